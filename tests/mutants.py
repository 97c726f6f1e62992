"""Puts bugs of one line into a copy of the tree, one by one: the tests named must notice each.

Usage: python tests/mutants.py [--device cpu|cuda] [--only NAME ...] [--list] [--jobs N]
                               [--build-only]
Exit status 1 if a bug survives or does not build. Run with the package's build requirements; the
tree itself is only read.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mutants_checks
import mutants_cpu
import mutants_cuda
import mutants_flash
import mutants_process
import mutants_transformers
import mutants_vllm
from mutant import Mutant

ROOT = Path(__file__).parents[1]
MUTANTS = [
    *mutants_cpu.KERNELS,
    *mutants_checks.CHECKS,
    *mutants_flash.CALLS,
    *mutants_transformers.HOOKS,
    *mutants_vllm.VLLM,
    *mutants_cuda.KERNELS,
]
BUILD_SECONDS, TEST_SECONDS = 1800, 180
CAUGHT = ("caught", "caught (crash)", "caught (time-out)")


class Broken(Exception):
    """The list or the tree is not what a run needs."""


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The file's text with the bug."""
    text = (root / mutant.file).read_text()
    count = text.count(mutant.original)
    if count != 1:
        raise Broken(f"{mutant.name}: the original occurs {count} times in {mutant.file}")
    if mutant.original == mutant.replacement:
        raise Broken(f"{mutant.name}: the replacement is the original")
    return text.replace(mutant.original, mutant.replacement)


def copy_tree(to: Path) -> None:
    """Copies what git tracks or would. Objects would not help: ninja knows them by their paths."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def keep_generic_kernels(tree: Path) -> None:
    """Of the CPU's instruction sets only one is built; the others' tables are left empty."""
    for path in (tree / "csrc/cpu/isa").glob("*.cpp"):
        name = re.search(r"const Kernels (k\w+) = ", path.read_text())
        if name and path.stem != "generic":
            empty = f'namespace paged_attn::cpu {{\nconst Kernels {name[1]}{{"{path.stem}"}};\n}}\n'
            guarded = f"#if defined(__x86_64__)\n{empty}#endif\n"
            path.write_text(f'#include "../isa.h"\n{guarded}')


def keep_shapes(tree: Path, shapes: set[str]) -> None:
    """Of the CUDA kernels only those of some rows of kKernelShapes are built."""
    folder = tree / "csrc/cuda/decode"
    text = (folder / "heuristics.h").read_text()
    begin = text.index("kKernelShapes[] = {")
    end = text.index("};", begin)
    rows = [line for line in text[begin:end].splitlines() if line.strip().rstrip(",") in shapes]
    if len(rows) != len(shapes):
        raise Broken(f"not all of {sorted(shapes)} are rows of kKernelShapes")
    table = "\n".join(["kKernelShapes[] = {", *rows, ""])
    (folder / "heuristics.h").write_text(text[:begin] + table + text[end:])
    generate = [sys.executable, folder / "instantiations/generate.py"]
    subprocess.run(generate, cwd=tree, check=True)


@dataclass
class Result:
    mutant: Mutant
    verdict: str
    seconds: float
    output: str


class Workshop:
    """A copy of the tree, in which mutants of one device and kernel shape are tried in turn."""

    def __init__(self, tree: Path, mutants: list[Mutant], jobs: int, build_only: bool) -> None:
        self.tree = tree
        self.mutants = sorted(mutants, key=lambda mutant: mutant.file)
        self.device = mutants[0].device
        self.build_only = build_only
        self.processes = mutants_process.forks()
        self.log = ""
        self.environment = {
            "MAX_JOBS": str(max(1, (os.cpu_count() or 1) // jobs)),
            **os.environ,
            "PAGED_ATTN_BUILD_CUDA": "1" if self.device == "cuda" else "0",
            "PAGED_ATTN_CPU_ISA": "generic",
            "PAGED_ATTN_TEST_SEED": "1",
            "PAGED_ATTN_WERROR": "0",
        }
        copy_tree(tree)
        keep_generic_kernels(tree)
        if self.device == "cuda":
            # Something must be left for the table not to be empty.
            shapes = {mutant.shape for mutant in mutants} - {""}
            keep_shapes(tree, shapes or {mutants_cuda.HALF.keywords["shape"]})

    def call(self, seconds: int, work: Callable[..., None], *arguments: str) -> int | None:
        """The exit status, None after a time-out; what was printed is in `log`."""
        path = self.tree / "output.log"
        process = self.processes.Process(
            target=work, args=(self.tree, self.environment, path, *arguments)
        )
        status = mutants_process.exit_status(process, seconds)
        self.log = path.read_text(errors="replace")
        return status

    def builds(self) -> bool:
        return self.call(BUILD_SECONDS, mutants_process.build) == 0

    def run_tests(self, mutants: list[Mutant]) -> int | None:
        ids = sorted({f"tests/{test}" for mutant in mutants for test in mutant.tests.split()})
        device = "gpu" if self.device == "cuda" else "not gpu"
        options = ("-q", "-x", "-p", "no:cacheprovider", "-m", device)
        return self.call(TEST_SECONDS, mutants_process.test, *options, *ids)

    def prepare(self) -> None:
        """Without a bug all tests must pass, or failures would mean nothing."""
        if not self.builds():
            raise Broken(f"the tree does not build:\n{self.log}")
        if self.build_only:
            return
        if self.run_tests(self.mutants) != 0 or " skipped" in self.log.splitlines()[-1]:
            raise Broken(f"tests fail or are skipped without any bug:\n{self.log}")

    def verdict(self, mutant: Mutant) -> str:
        if not self.builds():
            return "did not build"
        if self.build_only:
            return "built"
        status = self.run_tests([mutant])
        if status is None:
            return "caught (time-out)"
        if status < 0 or status >= 128:
            return "caught (crash)"
        return {0: "SURVIVED", 1: "caught"}.get(status, f"pytest ended with {status}")

    def try_mutants(self) -> list[Result]:
        """Mutants of one file follow one another: each build compiles little but that file."""
        self.prepare()
        results = []
        for mutant in self.mutants:
            start = time.monotonic()
            path = self.tree / mutant.file
            clean = path.read_text()
            path.write_text(mutated(mutant, self.tree))
            verdict = self.verdict(mutant)
            path.write_text(clean)
            results.append(Result(mutant, verdict, time.monotonic() - start, self.log))
            print(f"{mutant.name}: {verdict}, {results[-1].seconds:.0f} s", flush=True)
        return results


def batches(mutants: list[Mutant], jobs: int) -> list[list[Mutant]]:
    """Mutants that one copy serves: all of a kernel shape, on the CPU a share for each job."""
    ordered = sorted(mutants, key=lambda mutant: mutant.file)
    groups = [
        [mutant for mutant in ordered if (mutant.device, mutant.shape) == kind]
        for kind in sorted({(mutant.device, mutant.shape) for mutant in mutants})
    ]
    return [share for group in groups for i in range(jobs) if (share := group[i::jobs])]


def try_all(mutants: list[Mutant], jobs: int, build_only: bool) -> list[Result]:
    for mutant in mutants:
        mutated(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants") as folder, ThreadPoolExecutor(jobs) as pool:

        def work(numbered: tuple[int, list[Mutant]]) -> list[Result]:
            tree = Path(folder).resolve() / str(numbered[0])
            return Workshop(tree, numbered[1], jobs, build_only).try_mutants()

        shares = pool.map(work, enumerate(batches(mutants, jobs)))
        return [result for share in shares for result in share]


def report(results: list[Result], seconds: float, wanted: tuple[str, ...]) -> int:
    """Prints all results, and what was seen where one is not as it should be."""
    failed = [result for result in results if result.verdict not in wanted]
    for result in failed:
        tail = "\n".join(result.output.splitlines()[-25:])
        print(f"\n{result.mutant.name}: {result.verdict}\n{tail}")
    width = max(len(result.mutant.name) for result in results)
    print()
    for result in results:
        where = result.mutant.file.removeprefix("csrc/")
        print(
            f"{result.mutant.name:{width}}  {result.verdict:17}  {where}: {result.mutant.promise}"
        )
    print(f"{len(results) - len(failed)} of {len(results)} as they should be, {seconds:.0f} s")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants, of any device")
    parser.add_argument("--list", action="store_true", help="print what there is")
    parser.add_argument("--jobs", type=int, help="copies of the tree worked in at once")
    parser.add_argument("--build-only", action="store_true", help="run no tests: needs no GPU")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if mutant.device == arguments.device]
    if arguments.only:
        chosen = [mutant for mutant in MUTANTS if mutant.name in arguments.only]
        if unknown := set(arguments.only) - {mutant.name for mutant in chosen}:
            parser.error(f"no mutants of these names: {', '.join(sorted(unknown))}")
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.name}  {mutant.file}  {mutant.promise}  [{mutant.tests}]")
        return 0
    # One GPU serves one run of tests at a time, and its kernels take every processor to compile.
    on_cuda = any(mutant.device == "cuda" for mutant in chosen)
    jobs = arguments.jobs or (1 if on_cuda else min(2, os.cpu_count() or 1))
    # Read when torch is imported, which all processes inherit.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    start = time.monotonic()
    try:
        results = try_all(chosen, jobs, arguments.build_only)
    except Broken as broken:
        print(broken, file=sys.stderr)
        return 1
    wanted = ("built",) if arguments.build_only else CAUGHT
    return report(results, time.monotonic() - start, wanted)


if __name__ == "__main__":
    sys.exit(main())
