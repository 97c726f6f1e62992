"""`python -m paged_attn [--json]`: what was built, what was loaded, and why not."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch

from . import __version__, _library


def cpu_backend() -> dict[str, Any]:
    """The instruction set of the CPU kernels, or why there is none."""
    try:
        return {"loaded": True, "isa": torch.ops.paged_attn._cpu_isa(), "why_not": None}
    except RuntimeError as error:
        return {"loaded": False, "isa": None, "why_not": str(error)}


def report() -> dict[str, Any]:
    """What is installed, as JSON-able values; None where there is nothing."""
    built = _library.build_info()
    gpus = [
        {
            "name": torch.cuda.get_device_name(i),
            "architecture": "{}.{}".format(*torch.cuda.get_device_capability(i)),
        }
        for i in range(torch.cuda.device_count())
    ]
    return {
        "paged_attn": __version__,
        "python": platform.python_version(),
        "torch": {"built_with": built.get("torch"), "running": torch.__version__},
        "cuda": {"built_with": built.get("cuda"), "running": torch.version.cuda},
        "cuda_architectures": built.get("archs"),
        "gpus": gpus,
        "backends": {
            "cpu": cpu_backend(),
            "cuda": {
                "loaded": _library.why_no_cuda is None,
                "why_not": _library.why_no_cuda,
            },
        },
    }


def main() -> None:
    """Prints the report, as text or JSON."""
    parser = argparse.ArgumentParser(prog="python -m paged_attn", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    info = report()
    if parser.parse_args().json:
        print(json.dumps(info, indent=2))
        return
    print(f"paged_attn {info['paged_attn']}, Python {info['python']}")
    for name in ("torch", "cuda"):
        versions = info[name]
        print(f"{name}: built with {versions['built_with']}, running {versions['running']}")
    for gpu in info["gpus"]:
        print(f"GPU: {gpu['name']}, architecture {gpu['architecture']}")
    if not info["gpus"]:
        print("GPU: none")
    cpu, cuda = info["backends"]["cpu"], info["backends"]["cuda"]
    if cpu["loaded"]:
        print(f"CPU kernels: loaded, {cpu['isa']}")
    else:
        print(f"CPU kernels: not usable, because {cpu['why_not']}")
    if cuda["loaded"]:
        print(f"CUDA kernels: loaded, compiled for {info['cuda_architectures']}")
    else:
        print(f"CUDA kernels: not loaded, because {cuda['why_not']}")


if __name__ == "__main__":
    main()
