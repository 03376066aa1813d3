"""Breaks the package in one place at a time and shows that the tests notice.

    python tests/mutants.py                 # every set that can run here
    python tests/mutants.py --set host --only "swap rank"

A mutant is a textual change of one source file. Each runs the tests of its set in a copy of the
sources, and must make one fail. The script first runs them on an unchanged copy, which must pass.
Exit status 1: a mutant survived.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.mutant_list import MUTANTS, TESTS, Mutant  # noqa: E402

TIMEOUT = 240
"""Seconds after which a mutant counts as killed: it made the tests hang."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    outcome: str
    seconds: float


def copy_sources(folder: Path) -> None:
    """The package, the tests and what they use, without compiled files."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("fused_slots", "tests", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)


def mutated(text: str, mutant: Mutant) -> str:
    """The source with the mutant in it; the text to change must stand there exactly once."""
    count = text.count(mutant.old)
    if count != 1:
        raise SystemExit(
            f"mutant {mutant.name!r}: its text stands {count} times in {mutant.file}, not once"
        )
    changed = text.replace(mutant.old, mutant.new)
    compile(changed, mutant.file, "exec")
    return changed


def run_tests(folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> int | None:
    """pytest's exit status in a forked child (slow imports are shared); None = timed out."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _run_child(folder, arguments, environment)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _run_child(folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
    import pytest

    status = 70
    try:
        os.environ.update(environment)
        os.chdir(folder)
        with open(folder / "log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.path[:] = [str(folder), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]
            for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "fused_slots")]:
                del sys.modules[name]
            import fused_slots

            if not str(fused_slots.__file__).startswith(str(folder)):
                raise RuntimeError(f"the tests would run {fused_slots.__file__}")
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def try_mutant(folder: Path, mutant: Mutant) -> Verdict:
    """Run the mutant's tests with the mutant in place; put the source back."""
    path = folder / mutant.file
    original = path.read_text()
    started = time.monotonic()
    path.write_text(mutated(original, mutant))
    try:
        tests = TESTS[mutant.set]
        status = run_tests(folder, tests.arguments, tests.environment)
    finally:
        path.write_text(original)
    outcome = {None: "killed (timeout)", 1: "killed", 0: "SURVIVED"}.get(status, "killed (crash)")
    if status not in (0, 1, None):
        log = (folder / "log").read_text()
        if "fused_slots" not in log:
            raise SystemExit(f"mutant {mutant.name!r} stopped the run itself:\n{log[-2000:]}")
    return Verdict(mutant, outcome, time.monotonic() - started)


def check_baseline(folder: Path, name: str) -> None:
    """The unchanged copy must pass, or a red test proves nothing."""
    status = run_tests(folder, TESTS[name].arguments, TESTS[name].environment)
    if status != 0:
        log = (folder / "log").read_text()
        raise SystemExit(f"set {name}: tests fail without a mutant\n{log[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--set", choices=sorted(TESTS), help="default: all that can run here")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    options = parser.parse_args()
    sys.dont_write_bytecode = True  # a mutant of the same size and second would find old code
    import hypothesis.stateful  # noqa: F401 - imported before the forks, which share it
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    verdicts: list[Verdict] = []
    sets = [options.set] if options.set else [n for n, tests in TESTS.items() if tests.can_run()]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "copy"
        folder.mkdir()
        copy_sources(folder)
        for name in sets:
            chosen = [m for m in MUTANTS if m.set == name and options.only in m.name]
            for mutant in chosen:
                mutated((folder / mutant.file).read_text(), mutant)
            check_baseline(folder, name)
            for mutant in chosen:
                verdicts.append(verdict := try_mutant(folder, mutant))
                print(f"{verdict.outcome:16} {verdict.seconds:5.1f} s  {name}: {mutant.name}")
    survivors = [v.mutant.name for v in verdicts if v.outcome == "SURVIVED"]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants killed")
    for survivor in survivors:
        print(f"survived: {survivor}")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
