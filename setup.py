"""Build of the C++ extensions; everything else is in pyproject.toml.

`_attention` holds to Python's and torch's stable interfaces; `_core` is pybind11 and needs no torch, but one
build for each Python. Environment: `SB_BUILD_EXT=0` installs pure Python, where only the reference backend
works and the latency table is slow; `CXX` names the compiler. `SB_BUILD_CUDA` says whether the CUDA kernels
are built into `_attention`: `auto` (where torch itself has CUDA and nvcc is there), `0`, or `1` (always, on a
torch without CUDA too, where they are compiled, linked and imported but cannot run); `NVCC` names nvcc, else
it is that on PATH, else that of the wheels in requirements/nvcc.txt.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))

from cuda_build import Nvcc, compile_kernels, find_nvcc, runtime_folders  # noqa: E402

ATTENTION = Path("csrc/attention")
# What `_attention` shares with `_core`: headers.
TUNING = Path("csrc/tuning")
# Sources of `_core`, beside its bindings.
CORE = [Path("csrc/core"), Path("csrc/balance"), Path("csrc/latency"), TUNING]
# Kept: `make cuda-compile` finds here what an installation has compiled, and the other way round.
CUDA_OBJECTS = ROOT / "build" / "cuda"
# One source, compiled once per instruction set; the binding picks one at run time.
ISA_FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
}
if platform.machine() not in ("x86_64", "AMD64"):
    ISA_FLAGS = {"baseline": []}
# Without exceptions the kernels share no symbol at all between instruction sets.
KERNEL_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-exceptions",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]


def message(found: str, why: str, change: str) -> str:
    """Return an error text in three parts."""
    return f"\nsb-lightning: {found}.\n  Why it matters: {why}.\n  What to do: {change}.\n"


def compiler() -> list[str]:
    """Return the C++ compiler's command, or stop with what to install."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++" if shutil.which("g++") else "c++"]
    if shutil.which(command[0]) is None:
        raise SystemExit(
            message(
                f"no C++ compiler: '{command[0]}' is not on PATH",
                "the attention kernels are C++17 and are built on this machine",
                "install one (Debian/Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or point CXX "
                "at it; SB_BUILD_EXT=0 installs without the kernels",
            )
        )
    return command


def isa_objects(out: Path) -> list[str]:
    """Compile the kernels once per instruction set and return the object files."""
    out.mkdir(parents=True, exist_ok=True)
    source = ATTENTION / "cpu" / "kernels.cpp"
    newest = max(path.stat().st_mtime for path in [*ATTENTION.rglob("*.h"), source, Path("setup.py")])
    command = compiler()

    def compile_one(isa: str) -> str:
        target = out / f"kernels_{isa}.o"
        if not target.exists() or target.stat().st_mtime < newest:
            flags = [*KERNEL_FLAGS, *ISA_FLAGS[isa], f"-DSB_ISA={isa}", "-Icsrc"]
            part = target.with_suffix(f".{os.getpid()}.tmp")
            subprocess.run([*command, *flags, "-c", str(source), "-o", str(part)], check=True)
            part.replace(target)
        return str(target)

    with ThreadPoolExecutor(min(len(ISA_FLAGS), os.cpu_count() or 1)) as pool:
        return list(pool.map(compile_one, ISA_FLAGS))


def nvcc_to_use() -> Nvcc | None:
    """Return nvcc where the CUDA kernels are to be built, else None; stop where they cannot be."""
    wanted = os.environ.get("SB_BUILD_CUDA") or "auto"
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(
            message(
                f"SB_BUILD_CUDA is '{wanted}'",
                "it says whether the CUDA kernels are built",
                "set it to auto, 0 or 1, or unset it",
            )
        )
    import torch

    torch_cuda = torch.version.cuda
    if wanted == "0" or (wanted == "auto" and torch_cuda is None):
        return None
    nvcc = find_nvcc()
    if nvcc is None:
        named = os.environ.get("NVCC")
        text = message(
            f"NVCC is '{named}', which is no program"
            if named
            else "nvcc is not on PATH and in no wheel here",
            "it compiles the CUDA kernels",
            "install the CUDA toolkit or its compiler (pip install --no-deps -r requirements/nvcc.txt), "
            "or point NVCC at it; SB_BUILD_CUDA=0 builds without the CUDA kernels",
        )
        if wanted == "1":
            raise SystemExit(text)
        print(text, file=sys.stderr)
        return None
    if torch_cuda is not None and torch_cuda.split(".")[0] != nvcc.release.split(".")[0]:
        raise SystemExit(
            message(
                f"nvcc ({nvcc.path}) is of CUDA {nvcc.release} and torch {torch.__version__} was built with "
                f"CUDA {torch_cuda}",
                "kernels of another major version may not run on the driver that torch needs",
                f"install the toolkit of CUDA {torch_cuda.split('.')[0]} and point NVCC at its nvcc, or "
                "build without CUDA kernels: SB_BUILD_CUDA=0",
            )
        )
    if not runtime_folders(nvcc):
        raise SystemExit(
            message(
                f"the static CUDA runtime (libcudart_static.a) is not beside nvcc ({nvcc.path})",
                "the CUDA kernels are linked with it",
                f"install the development files of the runtime of CUDA {nvcc.release}, or its wheel: "
                "pip install --no-deps -r requirements/nvcc.txt; SB_BUILD_CUDA=0 builds without the kernels",
            )
        )
    return nvcc


def cuda_objects(nvcc: Nvcc) -> list[str]:
    """Compile the CUDA kernels and return the object files."""
    try:
        return [str(one.target) for one in compile_kernels(nvcc, CUDA_OBJECTS)]
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            message(
                f"nvcc ({nvcc.path}, CUDA {nvcc.release}) does not compile {error.cmd[-3]}",
                f"the CUDA kernels are part of the extension; it says: {error.stderr.strip()[-2000:]}",
                "use another release of the CUDA toolkit (13.0 is tested), or build without CUDA kernels: "
                "SB_BUILD_CUDA=0",
            )
        ) from None


def extension_and_command() -> tuple[list, type]:
    """Return the extension modules and the command that builds them."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        reason = str(error)

        class MissingTorch(build_ext):
            def run(self) -> None:
                raise SystemExit(
                    message(
                        f"torch cannot be imported while building ({reason})",
                        "the extension is built against the torch that it will run with, so pip must not "
                        "build it in an isolated environment",
                        "install torch >= 2.11 first, then run: pip install --no-build-isolation .",
                    )
                )

        return [Extension("sb_lightning._attention", [])], MissingTorch

    module = CppExtension(
        "sb_lightning._attention",
        sorted(
            str(path)
            for path in ATTENTION.rglob("*.cpp")
            if path.name != "kernels.cpp" and path.parent.name != "cuda"
        ),
        depends=sorted(
            str(path)
            for path in [
                *ATTENTION.rglob("*.h"),
                *TUNING.glob("*.h"),
                ATTENTION / "cpu" / "kernels.cpp",
                Path("setup.py"),
            ]
        ),
        include_dirs=[str(ROOT / "csrc")],
        # The stable ABI of torch 2.11: one build serves every later torch.
        define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],
        extra_compile_args=["-O3", "-fopenmp", "-fvisibility=hidden"],
        extra_link_args=["-fopenmp", "-s"],
        py_limited_api=True,
    )

    nvcc = nvcc_to_use()
    if nvcc is not None:
        module.sources += sorted(str(path) for path in (ATTENTION / "cuda").glob("*.cpp"))
        module.library_dirs += runtime_folders(nvcc)
        module.libraries += ["cudart_static", "rt", "pthread", "dl"]
    has_ninja = shutil.which("ninja") is not None or _has_ninja_module()

    class BuildAttention(BuildExtension):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, use_ninja=has_ninja, **kwargs)

        def build_extensions(self) -> None:
            compiler()
            if not has_ninja:
                print(
                    message(
                        "ninja is not installed",
                        "the files are compiled one after another, which is slower",
                        "pip install ninja, if you build often",
                    ),
                    file=sys.stderr,
                )
            module.extra_objects = isa_objects(Path(self.build_temp) / "isa")
            if nvcc is not None:
                module.extra_objects += cuda_objects(nvcc)
            super().build_extensions()

    return [module, core_extension()], BuildAttention


def core_extension() -> Extension:
    """Return the extension module that needs no torch."""
    try:
        import pybind11
    except ImportError as error:
        raise SystemExit(
            message(
                f"pybind11 cannot be imported while building ({error})",
                "the latency table in C++ is bound to Python with it",
                "pip install pybind11, then build again",
            )
        ) from None
    return Extension(
        "sb_lightning._core",
        sorted(str(path) for folder in CORE for path in folder.rglob("*.cpp")),
        depends=["setup.py", *sorted(str(path) for folder in CORE for path in folder.rglob("*.h"))],
        include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
        # Ranks plan apart and must agree to the last bit: no fused operations.
        extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
        extra_link_args=["-s"],
        language="c++",
    )


def _has_ninja_module() -> bool:
    try:
        import ninja
    except ImportError:
        return False
    os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])
    return True


if os.environ.get("SB_BUILD_EXT", "1") == "0":
    setup()
else:
    os.chdir(ROOT)
    modules, command = extension_and_command()
    setup(ext_modules=modules, cmdclass={"build_ext": command})
