"""Builds the extension modules; everything static is in pyproject.toml.

Environment: PAGED_ATTN_BUILD_CUDA=1 insists on the CUDA kernels, 0 leaves them out; default: built
if there is a toolkit of torch's CUDA major version. TORCH_CUDA_ARCH_LIST: "8.0;9.0+PTX", say;
default: the GPUs here, else ALL_ARCHS. PAGED_ATTN_SANITIZE=1: ASan and UBSan in the CPU code.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import torch
from setuptools import Extension, setup

ROOT = Path(__file__).parent
ALL_ARCHS = ["8.0", "8.9", "9.0", "10.0", "12.0+PTX"]


def sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def capture(*command: str) -> str:
    """What the command prints; '' if it fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.STDOUT, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_cuda_home() -> str | None:
    """The toolkit's folder. NOTE: the nvcc on PATH may be a wrapper script outside the toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        top = re.search(r"^#\$ TOP=(.+)$", capture(nvcc, "--dryrun", "-x", "cu", "-"), re.M)
        homes += [str(Path(nvcc).resolve().parents[1]), top and os.path.realpath(top[1].strip())]
    for home in filter(None, [*homes, "/usr/local/cuda"]):
        if Path(home, "include/cuda_runtime.h").is_file() and Path(home, "bin/nvcc").is_file():
            return home
    return None


def why_no_cuda(home: str | None) -> str | None:
    """Why the CUDA kernels are not built, or None if they are."""
    if os.environ.get("PAGED_ATTN_BUILD_CUDA") == "0":
        return "PAGED_ATTN_BUILD_CUDA is 0"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if home is None:
        return "no CUDA toolkit was found (nvcc on PATH, CUDA_HOME or /usr/local/cuda)"
    release = re.search(r"release (\d+)\.\d+", capture(f"{home}/bin/nvcc", "--version"))
    if release and release[1] == torch.version.cuda.split(".")[0]:
        return None
    found = release[0] if release else "of unknown release"
    return f"the CUDA toolkit in {home} is {found}, torch is for CUDA {torch.version.cuda}"


def architectures(home: str) -> str:
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return listed
    query = capture("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    known = capture(f"{home}/bin/nvcc", "--list-gpu-arch").split()
    all_known = [a for a in ALL_ARCHS if f"compute_{a.split('+')[0].replace('.', '')}" in known]
    return ";".join(sorted(set(re.findall(r"^\d+\.\d+$", query, re.M))) or all_known)


cuda_home = find_cuda_home()
no_cuda = why_no_cuda(cuda_home)
if no_cuda and os.environ.get("PAGED_ATTN_BUILD_CUDA") == "1":
    sys.exit(f"paged_attn: PAGED_ATTN_BUILD_CUDA is 1, but {no_cuda}")
if no_cuda:
    print(f"paged_attn: building for the CPU only, because {no_cuda}")
else:
    # torch reads both when cpp_extension is imported.
    os.environ.update(CUDA_HOME=cuda_home, TORCH_CUDA_ARCH_LIST=architectures(cuda_home))

from torch.utils import cpp_extension  # noqa: E402

CXX_FLAGS = ["-std=c++17", "-O3", "-g0", "-Wall", "-Wextra", "-Werror"]
CXX_FLAGS += ["-fvisibility=hidden", "-fno-math-errno"]
if "clang" not in capture(os.environ.get("CXX", "c++"), "--version"):
    # Same-named templates of two modules in one process must not be merged.
    CXX_FLAGS.append("-fno-gnu-unique")
NVCC_FLAGS = ["-std=c++17", "-O3", "--compress-mode=size", "--Werror", "all-warnings"]
NVCC_FLAGS += ["-Xcompiler", "-Wall,-Wextra,-fvisibility=hidden"]
NVCC_FLAGS += ["-Xptxas", "-warn-spills,-warn-lmem-usage"]
TORCH_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
for folder in cpp_extension.include_paths():
    TORCH_FLAGS += ["-isystem", folder]
sanitize = os.environ.get("PAGED_ATTN_SANITIZE") == "1"
LINK_FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] * sanitize
CXX_FLAGS += ["-O1", "-g1", *LINK_FLAGS] * sanitize


def torch_library(name: str, files: list[str], libraries: list[str], compile_args, link_args):
    """A library of ops: not a Python module, so that it depends on no Python version."""
    return Extension(
        f"paged_attn.{name}",
        [f"csrc/torch/{shared}.cpp" for shared in ("argument", "checks", "content")] + files,
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
    Extension(
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
    files = ["csrc/torch/ops_cuda.cpp", *sources("csrc/cuda/**/*.cu")]
    flags = {"cxx": cxx_flags, "nvcc": NVCC_FLAGS}
    extensions.append(torch_library("_C_cuda", files, ["torch_cuda"], flags, runtime))


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
        path = Path(self.get_ext_fullpath("paged_attn._C_cpu")).with_name("_build_info.json")
        path.write_text(json.dumps(info, indent=2) + "\n")


setup(ext_modules=extensions, cmdclass={"build_ext": BuildExtensions})
