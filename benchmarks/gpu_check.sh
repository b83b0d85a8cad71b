#!/usr/bin/env bash
# Checks the CUDA kernels on a machine with a GPU, in under 5 minutes: builds them, compares them with the naive twin,
# the CPU and the emulator, runs compute-sanitizer, and takes times beside scaled_dot_product_attention. Needs torch
# built for CUDA, numpy, setuptools, nvcc and a C++ compiler, and no network. From a clean checkout:
#
#   benchmarks/gpu_check.sh [--output FOLDER] [--only SECTION ...]        PYTHON names the interpreter
#
# Exit code 0: no check failed; 1: some did; 2: it cannot run here. The table goes to benchmarks/results/gpu_*.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$(if [ -x .venv/bin/python ]; then echo .venv/bin/python; else command -v python3; fi)}
LIMIT_S=290
step() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }
stop() {
  printf 'gpu_check: %s.\n  Why it matters: %s.\n  What to do: %s.\n' "$@" >&2
  exit 2
}

step "machine"
for module in torch numpy setuptools; do
  "$PYTHON" -c "import $module" 2>/dev/null ||
    stop "$PYTHON cannot import $module" "the kernels are built and run with it" "install it, or let PYTHON name another"
done
"$PYTHON" - <<'END'
import sys

sys.path.insert(0, "csrc")
import torch
from cuda_build import find_nvcc

nvcc = find_nvcc()
print("torch", torch.__version__, "CUDA", torch.version.cuda)
print("nvcc", f"{nvcc.path}, CUDA {nvcc.release}" if nvcc else "not found")
gpu = torch.cuda.is_available()
print("GPU", torch.cuda.get_device_name() if gpu else "none that torch sees: builds, then stops")
END
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
fi

step "build"
if ! "$PYTHON" -c 'import pybind11' 2>/dev/null; then
  # torch carries pybind11's headers; all that the build asks the package for is where they are.
  shim=$(mktemp -d)
  trap 'rm -rf "$shim"' EXIT
  mkdir "$shim/pybind11"
  echo 'def get_include():
    from pathlib import Path

    import torch

    return str(Path(torch.__file__).parent / "include")' >"$shim/pybind11/__init__.py"
  export PYTHONPATH="$shim${PYTHONPATH:+:$PYTHONPATH}"
fi
# Beside it the emulator; where that fails, its checks say so.
(cd tests/cuda && "$PYTHON" -c 'import emulated; emulated.build()' >/dev/null 2>&1) &
emulator=$!
# All architectures of a file at once: the longest file decides where there are many cores.
log=build/gpu_check.log
mkdir -p build
if ! NVCC_APPEND_FLAGS="--threads=0 ${NVCC_APPEND_FLAGS:-}" SB_BUILD_CUDA=1 \
  "$PYTHON" setup.py -q build_ext --inplace >"$log" 2>&1; then
  tail -n 30 "$log" >&2
  stop "the kernels do not build" "the checks run them" "change what is named above; all of it is in $log"
fi
wait "$emulator" || true

step "checks"
code=0
# A slow build leaves no less than two minutes.
left=$((LIMIT_S - SECONDS > 120 ? LIMIT_S - SECONDS : 120))
"$PYTHON" benchmarks/gpu_check.py --total-s "$left" "$@" || code=$?
step "done"
exit "$code"
