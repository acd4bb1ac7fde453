// Writes tiny random models, one of each architecture, as GGUF files:
//
//     generate FOLDER NAME    FOLDER/NAME.gguf, of the architecture NAME
//     generate                the names of all, each with a tab and "" or why there is no model of it
//
// What a model of an architecture looks like is said by llama.cpp's own test, which is compiled from the source of the pin (TEST_SOURCE) with its
// main() out of use. Ours are the weights, the length of the context and the window.

#include <cmath>
#include <cstring>
#include <random>
#include <regex>
#include <set>

static int upstream_main(int argc, char ** argv);
#define main upstream_main
#include TEST_SOURCE
#undef main

#include "../src/llama-model.h"

namespace {

const uint32_t N_CTX = 2048, WINDOW = 128;

// Names of those weights from which the logits of attention come. Larger ones make it choose: with few positions read, the output is another
bool makes_logits(const std::string & name) {
    return std::regex_search(name, std::regex("attn_(q|k|qkv|q_b|kv_b|k_b)\\.weight$"));
}

// Normal, and never of a size that depends on the shape: a matrix keeps the length of a vector, a norm is near 1
void set_weights(ggml_tensor * t, void *) {
    const std::string name = t->name;
    std::mt19937 gen(std::hash<std::string>()(name));
    std::normal_distribution<float> normal(0.0f, 1.0f);

    const bool  is_norm   = name.find("norm") != std::string::npos && name.find(".weight") != std::string::npos;
    const bool  is_decay  = name.find("ssm_a") != std::string::npos; // of a recurrent state: negative
    const float spread    = is_norm || ggml_n_dims(t) == 1 ? 0.1f : (makes_logits(name) ? 2.0f : 1.0f)/std::sqrt((float) t->ne[0]);

    std::vector<float> values(ggml_nelements(t));
    for (float & x : values) {
        x = spread*normal(gen) + (is_norm ? 1.0f : 0.0f);
        x = is_decay ? -std::fabs(x) : x;
    }
    if (t->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    } else {
        std::vector<ggml_fp16_t> half(values.size());
        ggml_fp32_to_fp16_row(values.data(), half.data(), half.size());
        GGML_ASSERT(t->type == GGML_TYPE_F16);
        ggml_backend_tensor_set(t, half.data(), 0, ggml_nbytes(t));
    }
}

// the metadata that the model was made of, and all its tensors. llama.cpp's own way to save a model refuses some architectures
void save(const gguf_context * made_of, const llama_model * model, const std::string & path) {
    gguf_context_ptr out(gguf_init_empty());
    gguf_set_kv(out.get(), made_of);
    std::set<std::string> seen;
    for (const auto & [name, t] : llama_internal_get_tensor_map(model)) {
        if (seen.insert(name).second) {
            gguf_add_tensor(out.get(), t);
        }
    }
    gguf_write_to_file(out.get(), path.c_str(), false);
}

// "" or why upstream's test makes no model of it
const char * why_not(llm_arch arch) {
    const bool is_head = arch == LLM_ARCH_EAGLE3 || arch == LLM_ARCH_DFLASH;
    return is_head ? "the draft of another model" : arch_supported(arch) ? "" : "llama.cpp's own test leaves it out";
}

void make(llm_arch arch, const std::string & path) {
    gguf_context_ptr about = get_gguf_ctx(arch, moe_mandatory(arch));
    const std::string name = llm_arch_name(arch);
    gguf_set_val_u32(about.get(), (name + ".context_length").c_str(), N_CTX);
    gguf_set_val_u32(about.get(), (name + ".attention.sliding_window").c_str(), WINDOW);
    llama_model_ptr model(llama_model_init_from_user(about.get(), set_weights, nullptr, llama_model_default_params()));
    if (!model) {
        throw std::runtime_error("llama.cpp refuses the metadata");
    }
    save(about.get(), model.get(), path);
}

} // namespace

int main(int argc, char ** argv) {
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) {
            fputs(text, stderr);
        }
    }, nullptr);
    for (const llm_arch arch : llm_arch_all()) {
        const std::string name = llm_arch_name(arch);
        if (argc == 1 && arch != LLM_ARCH_UNKNOWN) {
            printf("%s\t%s\n", name.c_str(), why_not(arch));
        } else if (argc == 3 && name == argv[2]) {
            make(arch, std::string(argv[1]) + "/" + name + ".gguf");
        }
    }
    return 0;
}
