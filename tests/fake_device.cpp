// Devices that are not there: "GPUs" whose memory the CPU can not touch, computed by the CPU backend.
//
// Loaded with ggml_backend_load(). Their memory is mapped without access, except while a function of the device itself runs, so an op
// of the CPU backend that reads it crashes; and a graph on a device with a source in other memory aborts. FAKE_DEVICES: how many.
// FAKE_REFUSE: sub-operations of SPARSE_ATTN that supports_op() denies, as a string of digits. FAKE_FULL: no memory for the smallest buffers.
// FAKE_MEMORY: the bytes of each, of which buffers take theirs.

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace {

struct memory {
    void * base;
    size_t size;
};

struct device {
    std::string                 name;
    std::set<memory *>          buffers;
    ggml_backend_buffer_type    buft;
    ggml_backend_device         dev;
    long                        n_nodes[8] = {}; // of SPARSE_ATTN that it ran, by sub-operation

    size_t total() const {
        const char * n = getenv("FAKE_MEMORY");
        return n ? strtoull(n, nullptr, 10) : (size_t) 1 << 34;
    }
    size_t free() const {
        size_t res = total();
        for (const memory * m : buffers) {
            res -= m->size;
        }
        return res;
    }

    void protect(int prot) {
        for (const memory * m : buffers) {
            if (mprotect(m->base, m->size, prot) != 0) {
                abort();
            }
        }
    }
};

struct open_memory { // for as long as a function of the device runs
    device & d;
    explicit open_memory(device & d) : d(d) { d.protect(PROT_READ | PROT_WRITE); }
    ~open_memory() { d.protect(PROT_NONE); }
};

device & of(ggml_backend_buffer_t buffer) { return *(device *) buffer->buft->context; }

char * at(const ggml_tensor * t, size_t offset) { return (char *) t->data + offset; }

const ggml_backend_buffer_i BUFFER = {
    /*.free_buffer   =*/ [](ggml_backend_buffer_t b) {
        auto * m = (memory *) b->context;
        of(b).buffers.erase(m);
        munmap(m->base, m->size);
        delete m;
    },
    /*.get_base      =*/ [](ggml_backend_buffer_t b) { return ((memory *) b->context)->base; },
    /*.init_tensor   =*/ nullptr,
    /*.memset_tensor =*/ [](ggml_backend_buffer_t b, ggml_tensor * t, uint8_t v, size_t offset, size_t size) {
        open_memory open(of(b));
        memset(at(t, offset), v, size);
    },
    /*.set_tensor    =*/ [](ggml_backend_buffer_t b, ggml_tensor * t, const void * data, size_t offset, size_t size) {
        open_memory open(of(b));
        memcpy(at(t, offset), data, size);
    },
    /*.get_tensor    =*/ [](ggml_backend_buffer_t b, const ggml_tensor * t, void * data, size_t offset, size_t size) {
        open_memory open(of(b));
        memcpy(data, at(t, offset), size);
    },
    /*.set_tensor_2d =*/ nullptr,
    /*.get_tensor_2d =*/ nullptr,
    /*.cpy_tensor    =*/ nullptr,
    /*.clear         =*/ [](ggml_backend_buffer_t b, uint8_t v) {
        open_memory open(of(b));
        memset(((memory *) b->context)->base, v, b->size);
    },
    /*.reset         =*/ nullptr,
};

const ggml_backend_buffer_type_i BUFFER_TYPE = {
    /*.get_name       =*/ [](ggml_backend_buffer_type_t t) { return ((device *) t->context)->name.c_str(); },
    /*.alloc_buffer   =*/ [](ggml_backend_buffer_type_t t, size_t size) -> ggml_backend_buffer_t {
        if (getenv("FAKE_FULL") && size <= 128) {
            return nullptr;
        }
        auto * m = new memory { nullptr, (size + 4096)/4096*4096 };
        m->base = mmap(nullptr, m->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        ((device *) t->context)->buffers.insert(m);
        ggml_backend_buffer_t b = ggml_backend_buffer_init(t, BUFFER, m, size);
        if (getenv("FAKE_POISON")) { // what was never written is not zero
            ggml_backend_buffer_clear(b, 0xFF);
        }
        return b;
    },
    /*.get_alignment  =*/ [](ggml_backend_buffer_type_t) -> size_t { return 128; },
    /*.get_max_size   =*/ nullptr,
    /*.get_alloc_size =*/ nullptr,
    /*.is_host        =*/ [](ggml_backend_buffer_type_t) { return false; },
};

ggml_backend_t cpu() {
    static ggml_backend_t backend = [] {
        ggml_backend_t b = ggml_backend_cpu_init();
        ggml_backend_cpu_set_n_threads(b, 1);
        return b;
    }();
    return backend;
}

void check(const device & d, const ggml_tensor * node, const ggml_tensor * t) {
    const ggml_backend_buffer_t b = t->view_src ? t->view_src->buffer : t->buffer;
    if (!b || b->buft != &d.buft) {
        fprintf(stderr, "%s: %s of %s (%s) lies elsewhere\n", d.name.c_str(), t->name, node->name, ggml_op_name(node->op));
        abort();
    }
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    device & d = *(device *) backend->context;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE ||
            node->op == GGML_OP_TRANSPOSE) {
            continue;
        }
        check(d, node, node);
        for (const ggml_tensor * src : node->src) {
            if (src) {
                check(d, node, src);
            }
        }
        if (node->op == GGML_OP_SPARSE_ATTN) {
            d.n_nodes[node->op_params[0]]++;
        }
    }
    open_memory open(d);
    return ggml_backend_graph_compute(cpu(), graph);
}

const ggml_backend_i BACKEND = [] {
    ggml_backend_i res = {};
    res.get_name      = [](ggml_backend_t b) { return ((device *) b->context)->name.c_str(); };
    res.free          = [](ggml_backend_t b) { delete b; };
    res.graph_compute = compute;
    return res;
}();

const ggml_backend_device_i DEVICE = [] {
    ggml_backend_device_i res = {};
    res.get_name        = [](ggml_backend_dev_t d) { return ((device *) d->context)->name.c_str(); };
    res.get_description = res.get_name;
    res.get_memory      = [](ggml_backend_dev_t d, size_t * free, size_t * total) {
        *free  = ((device *) d->context)->free();
        *total = ((device *) d->context)->total();
    };
    res.get_type        = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    res.get_props       = [](ggml_backend_dev_t d, ggml_backend_dev_props * props) {
        *props = {};
        props->name = props->description = ((device *) d->context)->name.c_str();
        props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
        props->memory_free  = ((device *) d->context)->free();
        props->memory_total = ((device *) d->context)->total();
    };
    res.init_backend    = [](ggml_backend_dev_t d, const char *) {
        static ggml_guid guid = { 'f', 'a', 'k', 'e' };
        return new ggml_backend { &guid, BACKEND, d, d->context };
    };
    res.get_buffer_type = [](ggml_backend_dev_t d) { return &((device *) d->context)->buft; };
    res.supports_op     = [](ggml_backend_dev_t, const ggml_tensor * op) {
        const char * refuse = getenv("FAKE_REFUSE");
        if (op->op == GGML_OP_SPARSE_ATTN && refuse && strchr(refuse, '0' + op->op_params[0])) {
            return false;
        }
        return ggml_backend_supports_op(cpu(), op);
    };
    res.supports_buft   = [](ggml_backend_dev_t d, ggml_backend_buffer_type_t t) { return t == &((device *) d->context)->buft; };
    return res;
}();

std::vector<device *> devices;

ggml_backend_reg REG = {
    GGML_BACKEND_API_VERSION,
    {
        /*.get_name         =*/ [](ggml_backend_reg_t) { const char * name = getenv("FAKE_NAME"); return name ? name : "FAKE"; },
        /*.get_device_count =*/ [](ggml_backend_reg_t) { return devices.size(); },
        /*.get_device       =*/ [](ggml_backend_reg_t, size_t i) { return &devices[i]->dev; },
        /*.get_proc_address =*/ [](ggml_backend_reg_t, const char *) -> void * { return nullptr; },
    },
    nullptr,
};

} // namespace

extern "C" ggml_backend_reg_t ggml_backend_init(void) {
    const char * n = getenv("FAKE_DEVICES");
    while (devices.size() < (size_t) (n ? atoi(n) : 1)) {
        auto * d = new device();
        d->name = "FAKE" + std::to_string(devices.size());
        d->dev  = { DEVICE, &REG, d };
        d->buft = { BUFFER_TYPE, &d->dev, d };
        devices.push_back(d);
    }
    return &REG;
}

// how many nodes of a sub-operation a device ran
extern "C" long fake_count(int dev, int op) { return devices[dev]->n_nodes[op]; }
