#!/usr/bin/env bash
# Checks the CUDA kernels on a machine with a GPU: builds them, compares them with the naive twin and the emulator,
# runs compute-sanitizer, and prints times beside scaled_dot_product_attention. Needs torch with CUDA, nvcc and a C++
# compiler, no network. From a clean checkout; some 5 minutes.
#
#   benchmarks/gpu_check.sh [FILE.json]        PYTHON names the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$(if [ -x .venv/bin/python ]; then echo .venv/bin/python; else command -v python3; fi)}
step() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }

step "machine"
"$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
nvcc --version | tail -2 | head -1
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

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
SB_BUILD_CUDA=1 "$PYTHON" setup.py -q build_ext --inplace

step "the ops against the naive twin and the emulator"
"$PYTHON" benchmarks/gpu_check.py ops

for tool in memcheck racecheck; do
  step "compute-sanitizer $tool"
  if command -v compute-sanitizer >/dev/null; then
    compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name-exclude kernel_substring=at:: \
      "$PYTHON" benchmarks/gpu_check.py shapes 2>&1 | tail -5
  else
    echo "not on PATH: left out"
  fi
done

step "times"
"$PYTHON" benchmarks/gpu_check.py times ${1:+--json "$1"}
step "done"
