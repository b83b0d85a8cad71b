SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# A smaller torch without CUDA: make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
CONSTRAINTS := requirements/constraints.txt
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
SOURCES := $(CXX_FILES) csrc/cuda_build.py setup.py pyproject.toml
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help quickstart test check format cpp-test sanitize lab lab-ptx lab-mutations cuda-compile doctor clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(VENV)/.installed  ## environment, build, and the main job: train on real text on two ranks (about 5 minutes)
	$(BIN)/sb fit --config configs/quickstart.yaml

test: $(VENV)/.dev cpp-test  ## the whole test suite
	$(BIN)/python -m pytest

cpp-test: $(VENV)/.dev  ## the C++ unit tests
	@PATH="$(abspath $(BIN)):$$PATH"; cmake -S . -B build/cmake -G Ninja -DCMAKE_BUILD_TYPE=Release >build/cmake.log 2>&1 \
	  && cmake --build build/cmake >>build/cmake.log 2>&1 || { cat build/cmake.log; exit 1; }; \
	  ctest --test-dir build/cmake -LE lab --output-on-failure

# Where addresses are spread over more bits than it expects, ThreadSanitizer stops; setarch -R takes the spread away.
sanitize: $(VENV)/.dev  ## the C++ unit tests under AddressSanitizer, UBSan and ThreadSanitizer (some 4 minutes)
	@PATH="$(abspath $(BIN)):$$PATH"; mkdir -p build; \
	fixed=; setarch -R true 2>/dev/null && fixed="setarch -R"; \
	for pair in address:asan thread:tsan; do name=$${pair%%:*}; folder=build/$${pair##*:}; echo "$$name sanitizer ..."; \
	  cmake -S . -B $$folder -G Ninja -DSB_SANITIZE=$$name >$$folder.log 2>&1 \
	  && cmake --build $$folder >>$$folder.log 2>&1 || { cat $$folder.log; exit 1; }; \
	  $$fixed ctest --test-dir $$folder --output-on-failure || exit 1; \
	done

# Beside `make test`: the kernels' C++ tests under all schedules and sanitizers, and random shapes that it leaves out.
lab: $(VENV)/.dev  ## the CUDA kernels on the emulator: all schedules and sanitizers (some 2 minutes)
	@PATH="$(abspath $(BIN)):$$PATH"; mkdir -p build; \
	cmake -S . -B build/cmake -G Ninja -DCMAKE_BUILD_TYPE=Release >build/lab.log 2>&1 \
	  && cmake --build build/cmake --target lab >>build/lab.log 2>&1 || { cat build/lab.log; exit 1; }; \
	ctest --test-dir build/cmake -L lab -j 2 --output-on-failure
	SB_LAB=1 $(BIN)/python -m pytest -q tests/cuda -k test_lab_fuzz

lab-mutations: $(VENV)/.dev $(VENV)/.nvcc  ## plant known bugs in the CUDA kernels: each must be caught (some 6 minutes)
	$(BIN)/python tests/cuda/mutations.py

lab-ptx: $(VENV)/.dev $(VENV)/.nvcc  ## the CUDA kernels as nvcc compiles them, on the emulator (a minute)
	$(BIN)/python tests/cuda/ptx_lane.py

cuda-compile: $(VENV)/.dev $(VENV)/.nvcc  ## compile the CUDA kernels for all architectures; spills are errors
	$(BIN)/python benchmarks/cuda_kernels.py

check: $(VENV)/.dev  ## ruff, mypy, clang-format
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.dev  ## rewrite the files as `make check` wants them
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .
	$(BIN)/clang-format -i $(CXX_FILES)

doctor: $(VENV)/.installed  ## what works on this machine, and why the rest does not
	$(BIN)/sb doctor

clean:  ## remove what was built (not the environment)
	rm -rf build dist *.egg-info sb_lightning/*.so

.PHONY: tools
tools:
	@command -v $(PYTHON) >/dev/null || { echo "python3 is not on PATH: sb_lightning needs Python >= 3.10. To fix it, install it (Debian/Ubuntu: apt-get install python3 python3-venv python3-dev), or pass PYTHON=/path/to/python3."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$$($(PYTHON) --version) found: sb_lightning needs Python >= 3.10. To fix it, pass PYTHON=/path/to/a/newer/python3."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "this Python has no venv module: the environment cannot be made. To fix it, install it (Debian/Ubuntu: apt-get install python3-venv)."; exit 1; }
	@cxx="$${CXX:-$$(command -v g++ || echo c++)}"; command -v $${cxx%% *} >/dev/null || { echo "no C++ compiler on PATH: the attention kernels are C++17 and are built on this machine. To fix it, install one (Debian/Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++), or pass CXX=/path/to/compiler."; exit 1; }

$(VENV)/.torch: $(CONSTRAINTS) | tools
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and the build tools into $(VENV) ..."
	@$(PIP) install -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) install -c $(CONSTRAINTS) setuptools wheel ninja pybind11 numpy
	@mkdir -p build && touch $@

# The CUDA compiler, for SB_BUILD_CUDA=1 and cuda-compile where no toolkit is installed.
$(VENV)/.nvcc: requirements/nvcc.txt | $(VENV)/.torch
	@command -v "$${NVCC:-nvcc}" >/dev/null || { echo "no nvcc on PATH: installing that of PyPI ..."; $(PIP) install --no-deps -r $<; }
	@touch $@

BUILT_FROM := $(VENV)/.torch $(if $(filter 1,$(SB_BUILD_CUDA)),$(VENV)/.nvcc) $(SOURCES)

$(VENV)/.installed: $(BUILT_FROM)
	@echo "installing the dependencies and building the extension ..."
	@$(PIP) install -c $(CONSTRAINTS) --no-build-isolation -e .
	@touch $@

# Beside .installed, not after it: each builds the extension, and one is enough.
$(VENV)/.dev: $(BUILT_FROM)
	@echo "installing the dependencies and the development tools, building the extension ..."
	@$(PIP) install -c $(CONSTRAINTS) --no-build-isolation -e '.[dev]'
	@touch $(VENV)/.installed $@
