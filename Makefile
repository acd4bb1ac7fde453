# The task list. Everything longer than two lines is in Python.
PYTHON ?= python3
VENV    = .venv
SUM    := $(shell cksum < pyproject.toml | cut -d' ' -f1)
STAMP   = $(VENV)/stamp-$(SUM)
DEV     = $(VENV)/stamp-dev-$(SUM)
RUN     = $(VENV)/bin
PYTEST  = $(RUN)/python -m pytest -q
# a worker for each core, but each holds models of its own. In their order, since the last files are
# small ones: the workers end together. ARGS='-n 0' runs all in one process
WORKERS = -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PY      = pyorch tests bench hatch_build.py
CPP     = $(wildcard ggml_ops/*.[ch] ggml_ops/compilers/*.h ggml_ops/ref/*.[ch] ggml_ops/cpu/*.h ggml_ops/cpu/*.cpp ggml_ops/cuda/*.cu ggml_ops/cuda/*.cuh ggml_ops/llama/*.h ggml_ops/llama/*.cpp ggml_ops/rpc/*.h ggml_ops/rpc/*.cpp)
LOWEST  = .venv-lowest
PINS    = $(shell sed -n 's/^version *//p' patches/UPSTREAM)

# the threads of numpy and of ggml together slow the tests down
export OPENBLAS_NUM_THREADS = 1
# the tests start hundreds of Python processes
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-server test-all test-archs archs-table test-lowest test-gpu test-vulkan bench-gpu gpu-all wheels wheel-cuda wheel-vulkan figures numbers fuzz sanitize spec-table lint fmt build upstream patches-refresh patches-check clean

demo: build             ## build, download a small model (89 MiB), and let it complete sentences out of a long story, dense and sparse
	$(RUN)/sparq-cpp demo --yes

# both build for, and run on, the CPU, even where a GPU is
test test-server test-all test-archs archs-table: export SPARQ_CUDA = 0
test test-server test-all test-archs archs-table: export SPARQ_VULKAN = 0
# threads that spin while they wait take the core that another process of the tests needs
test test-server test-all test-archs archs-table test-lowest: export OMP_WAIT_POLICY = passive

test: build $(DEV)      ## build, then the quick tests
	$(PYTEST) $(WORKERS) -m 'not slow and not gpu' $(ARGS)

test-server: build $(DEV) ## builds llama-server, then the quick tests of it
	$(PYTEST) $(WORKERS) -m server $(ARGS)

test-all: build $(DEV)  ## every test that runs without a GPU; builds llama-server, and makes the converter's environment
	$(PYTEST) $(WORKERS) -m 'not gpu' $(ARGS)

test-archs: build $(DEV) ## every architecture of llama.cpp, of both pins; the first thing after moving a pin
	@set -e; for pin in $(PINS); do SPARQ_LLAMA_PIN=$$pin $(RUN)/sparq-cpp build && \
	    SPARQ_LLAMA_PIN=$$pin $(PYTEST) -n auto --maxprocesses 4 tests/archs $(ARGS); done

archs-table: build $(DEV) ## writes what that suite finds to docs/architectures.md
	@set -e; for pin in $(PINS); do SPARQ_LLAMA_PIN=$$pin $(RUN)/sparq-cpp build && \
	    SPARQ_LLAMA_PIN=$$pin $(RUN)/python tests/archs/suite.py; done

test-gpu: build $(DEV)  ## with a CUDA device: the op tests on it, decoding, compute-sanitizer
	SPARQ_TEST_DEVICE=cuda $(PYTEST) -m 'not slow' tests/ops/test_steps.py tests/ops/test_attn.py tests/ops/test_quant.py tests/ops/test_mixed_kinds.py
	$(PYTEST) -m 'gpu and not slow' tests/gpu $(ARGS)

test-vulkan: $(DEV)     ## builds with Vulkan (half an hour), then its tests, on any device or Mesa's software
	$(RUN)/sparq-cpp build --vulkan --tools
	$(RUN)/sparq-cpp build --vulkan --stock
	$(PYTEST) tests/e2e -k vulkan $(ARGS)

bench-gpu: build        ## with a CUDA device: attention by itself and tokens, as records
	$(RUN)/python -m bench gpu_attention
	$(RUN)/python -m bench gpu_tokens

gpu-all:                ## everything that needs a CUDA device, on a bare machine: no package index
	bench/gpu/all.sh

build: $(STAMP)         ## the patched library and its Python bindings
	$(RUN)/sparq-cpp build

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --editable '.[build]'
	@rm -f $(VENV)/stamp-* && touch $@

$(DEV): $(STAMP)
	$(RUN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

wheels: $(STAMP)        ## dist/: wheels with the library inside, for machines without a compiler
	$(RUN)/python -m pip install --quiet --editable '.[wheels]'
	$(RUN)/python -m pyorch.native.wheels dist $(ARGS)

wheel-cuda: $(STAMP)    ## dist/: what a GPU needs beside the wheel for Linux, where nvcc 13 and GCC are; an hour. ARGS=90: for one kind of GPU
	$(RUN)/python -m pip install --quiet --editable '.[wheel-cuda]'
	$(RUN)/python -m pyorch.native.wheels dist cuda $(ARGS)

wheel-vulkan: $(STAMP)  ## dist/: what other GPUs need beside the wheel, where glslc and the headers of Vulkan are; half an hour. ARGS=windows-x86_64: for Windows
	$(RUN)/python -m pip install --quiet --editable '.[wheels]'
	$(RUN)/python -m pyorch.native.wheels dist vulkan $(ARGS)

figures: $(STAMP)       ## draw bench/figures again from the committed records
	@$(RUN)/python -c 'import matplotlib' 2> /dev/null || $(RUN)/python -m pip install --quiet --editable '.[figures]'
	$(RUN)/python -m bench draw
	$(RUN)/sparq-cpp eval plot bench/results/amd-epyc-2-cores/eval repetition needle fidelity --out bench/figures

numbers: $(STAMP)       ## fill the marked numbers of README.md and docs/ from the committed records, and print which are history
	$(RUN)/python -m bench numbers

test-lowest:            ## the quick tests with the lowest versions that pyproject.toml declares; PYTHON=python3.11 or 3.10
	$(PYTHON) -m venv $(LOWEST)
	grep -oE '"[A-Za-z0-9-]+>=[0-9.]+' pyproject.toml | tr -d '"' | sed 's/>=/==/' > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --editable '.[test,eval,figures]' --constraint $(LOWEST)/lowest.txt
	SPARQ_CUDA=0 $(LOWEST)/bin/python -m pytest -q $(WORKERS) -m 'not slow and not gpu' -W ignore::DeprecationWarning $(ARGS)

fuzz: build $(DEV)      ## random operations on the cache, spec changes, restored states; OPS=20000, SPARQ_FUZZ_SEED=N
	SPARQ_FUZZ_OPS=$(or $(OPS),20000) $(PYTEST) tests/e2e/test_fuzz.py

sanitize: build $(DEV)  ## the op tests on sanitized builds of our sources: addresses, undefined behaviour, threads
	$(PYTEST) tests/ops/test_sanitize.py

spec-table: build       ## pyorch/attention/spec.json: the keys of a spec, as the library has them
	$(RUN)/python -c 'import ctypes; from pyorch import native; b = ctypes.create_string_buffer(1 << 14); native.load().llama_cpp._lib.llama_sparse_attn_keys(b, ctypes.c_size_t(len(b))); print(b.value.decode(), end="")' > pyorch/attention/spec.json

lint: $(DEV)            ## what the style asks, without changing anything
	$(RUN)/ruff check $(PY) && $(RUN)/ruff format --check $(PY)
	$(RUN)/mypy
	$(RUN)/python -m pyorch.native.cpp_style --check $(CPP)
	! grep -nE '^.{161}' $(CPP)

fmt: $(DEV)             ## bring Python and C++ to that style
	$(RUN)/ruff check --fix $(PY) && $(RUN)/ruff format $(PY)
	$(RUN)/python -m pyorch.native.cpp_style $(CPP)

upstream: $(STAMP)      ## .upstream/llama.cpp: the pinned source and the series as commits
	$(RUN)/python -m pyorch.native.upstream upstream $(if $(FORCE),--force)

patches-refresh: $(STAMP) ## export its commits to patches/
	$(RUN)/python -m pyorch.native.upstream refresh

patches-check: $(STAMP) ## the series applies, round-trips, and keeps its budget
	$(RUN)/python -m pyorch.native.upstream check

clean:                  ## the virtual environment and the upstream work tree; the cache stays
	rm -rf $(VENV) $(LOWEST) .upstream
