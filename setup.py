"""Builds the extension modules. Everything static is in pyproject.toml, variables in README.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import setuptools
import torch

ROOT = Path(__file__).parent
ALL_ARCHS = ["8.0", "8.9", "9.0", "10.0", "12.0+PTX"]


def sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def capture(*command: str) -> str:
    try:
        return subprocess.check_output(command, stderr=subprocess.STDOUT, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_cuda_home() -> str | None:
    """The toolkit's folder. NOTE: the nvcc on PATH may be a wrapper script outside the toolkit."""
    if named := os.environ.get("CUDA_HOME"):
        homes = [named]
    else:
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        top = re.search(r"^#\$ TOP=(.+)$", capture(nvcc, "--dryrun", "-x", "cu", "-"), re.M)
        homes = [Path(nvcc).resolve().parents[1], os.path.realpath(top[1].strip()) if top else ""]
    for home in map(str, homes):
        if all(Path(home, file).is_file() for file in ("include/cuda_runtime.h", "bin/nvcc")):
            return home
    return None


def why_no_cuda(home: str | None) -> str | None:
    """Why the CUDA kernels are not built, or None if they are."""
    if wanted == "0":
        return "PAGED_ATTN_BUILD_CUDA is 0"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if home is None:
        named = os.environ.get("CUDA_HOME", "nvcc on PATH, /usr/local/cuda; CUDA_HOME is not set")
        return f"no CUDA toolkit was found ({named})"
    release = re.search(r"release (\d+)\.\d+|$", capture(f"{home}/bin/nvcc", "--version"))
    if release[1] != torch.version.cuda.split(".")[0]:
        return f"the toolkit in {home} is CUDA {release[0]}, torch is for CUDA {torch.version.cuda}"
    return None


def architectures(home: str) -> str:
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return listed
    query = capture("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    known = capture(f"{home}/bin/nvcc", "--list-gpu-arch").split()
    all_known = [a for a in ALL_ARCHS if f"compute_{a.split('+')[0].replace('.', '')}" in known]
    return ";".join(sorted(set(re.findall(r"^\d+\.\d+$", query, re.M))) or all_known)


if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"paged_attn needs setuptools>=77, got {setuptools.__version__}")
wanted = os.environ.get("PAGED_ATTN_BUILD_CUDA", "")
cuda_home = find_cuda_home()
no_cuda = why_no_cuda(cuda_home)
if no_cuda:
    (sys.exit if wanted == "1" else print)(f"paged_attn: no CUDA kernels, because {no_cuda}")
else:
    # torch reads both when cpp_extension is imported.
    os.environ.update(CUDA_HOME=cuda_home, TORCH_CUDA_ARCH_LIST=architectures(cuda_home))

from torch.utils import cpp_extension  # noqa: E402

werror = os.environ.get("PAGED_ATTN_WERROR") == "1"
CXX_FLAGS = "-std=c++17 -O3 -g0 -Wall -Wextra -fvisibility=hidden -fno-math-errno".split()
CXX_FLAGS += ["-Werror"] * werror
if "clang" not in capture(os.environ.get("CXX", "c++"), "--version"):
    # Same-named templates of two modules in one process must not be merged.
    CXX_FLAGS.append("-fno-gnu-unique")
NVCC_FLAGS = "-std=c++17 -O3 -Xfatbin -compress-all -Xptxas -warn-spills,-warn-lmem-usage".split()
NVCC_FLAGS += ["-Xcompiler", "-Wall,-Wextra,-fvisibility=hidden"]
NVCC_FLAGS += ["--Werror", "all-warnings"] * werror
TORCH_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
TORCH_FLAGS += [x for folder in cpp_extension.include_paths() for x in ("-isystem", folder)]
sanitize = os.environ.get("PAGED_ATTN_SANITIZE") == "1"
LINK_FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] * sanitize
CXX_FLAGS += ["-O1", "-g1", *LINK_FLAGS] * sanitize
SHARED = ["argument", "shared_checks", "checks", "cache_checks", "content"]


def torch_library(name: str, files: list[str], libraries: list[str], compile_args, link_args):
    """A library of ops: not a Python module, so that it depends on no Python version."""
    return setuptools.Extension(
        f"paged_attn.{name}",
        [f"csrc/torch/{shared}.cpp" for shared in SHARED] + files,
        library_dirs=cpp_extension.library_paths(),
        libraries=["c10", "torch", "torch_cpu", *libraries],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        py_limited_api=True,
    )


cxx_flags = CXX_FLAGS + TORCH_FLAGS
cpu_files = ["csrc/torch/schema.cpp", "csrc/torch/ops_cpu.cpp", *sources("csrc/cpu/**/*.cpp")]
extensions = [
    torch_library("_C_cpu", cpu_files, [], cxx_flags, LINK_FLAGS),
    setuptools.Extension(
        "paged_attn._block_manager",
        sources("csrc/block_manager/*.cpp"),
        extra_compile_args=[*CXX_FLAGS, "-isystem", pybind11.get_include()],
        extra_link_args=LINK_FLAGS,
    ),
]
if no_cuda is None:
    cxx_flags = [*cxx_flags, "-DUSE_CUDA", "-isystem", f"{cuda_home}/include"]
    # The CUDA runtime is linked statically: the library is not tied to torch's.
    runtime = [f"-L{cuda_home}/lib64", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    cuda_files = ["csrc/torch/ops_cuda.cpp", *sources("csrc/cuda/**/*.cu")]
    flags = {"cxx": cxx_flags, "nvcc": NVCC_FLAGS}
    extensions.append(torch_library("_C_cuda", cuda_files, ["torch_cuda"], flags, runtime))


class BuildExtensions(cpp_extension.BuildExtension):
    """Keeps objects from one build to the next and writes down what was built."""

    def build_extension(self, extension):
        name = f"{extension.name}-{torch.__version__}{'-sanitize' * sanitize}"
        self.build_temp = str(ROOT / "build/objects" / name)
        super().build_extension(extension)

    def run(self):
        super().run()
        info = {"torch": torch.__version__, "why_no_cuda": no_cuda}
        if not no_cuda:
            info |= {"cuda": torch.version.cuda, "archs": os.environ["TORCH_CUDA_ARCH_LIST"]}
        folder = Path(self.get_ext_fullpath("paged_attn._C_cpu")).parent
        for stale in folder.glob("_C_cuda.*") if no_cuda else ():
            stale.unlink()
        (folder / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n")


setuptools.setup(ext_modules=extensions, cmdclass={"build_ext": BuildExtensions})
