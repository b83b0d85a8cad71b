"""Fixtures for all tests: the pool of two ranks, and a check that a test leaves nothing behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
# Set by Lightning or torch on purpose, for the life of the process.
ALLOWED_ENVIRONMENT = {
    "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS", "PYTEST_CURRENT_TEST", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "CRC32C_SW_MODE", "PYTORCH_NVML_BASED_CUDA_CHECK", "CUBLAS_WORKSPACE_CONFIG", "TOKENIZERS_PARALLELISM",
    "PYTORCH_CUDA_ALLOC_CONF", "WANDB_SERVICE", "SB_LAUNCHER_PID", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
}  # fmt: skip


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[object]:
    """Two ranks joined by gloo: `gloo_pool.run(function, *args)` returns `[rank 0's result, rank 1's]`."""
    from gloo import GlooPool

    pool = GlooPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    import torch

    environment = dict(os.environ)
    threads, dtype, folder = torch.get_num_threads(), torch.get_default_dtype(), os.getcwd()
    yield
    changed = {
        name for name in set(environment) | set(os.environ) if environment.get(name) != os.environ.get(name)
    }
    leaked = sorted(name for name in changed - ALLOWED_ENVIRONMENT if not name.startswith("_TORCHINDUCTOR"))
    for name in changed:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            os.environ.pop(name, None)
    dtype_after, folder_after, threads_after = torch.get_default_dtype(), os.getcwd(), torch.get_num_threads()
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    os.chdir(folder)
    assert not leaked, f"the test left environment variables changed: {leaked}"
    assert dtype_after == dtype, "the test left another default dtype"
    assert folder_after == folder, "the test left another working directory"
    assert threads_after == threads, "the test left another number of threads"
