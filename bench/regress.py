"""Is this working tree slower than another revision? Both measured in turns, in fresh processes.

    python -m bench.regress --base REVISION [--pairs 6] [--select "step and 256x6"] [--history]
    python -m bench.regress --gpu --base-dir FOLDER       # an unpacked tree; needs no git

Both sides run this tree's benchmarks, each on its own copy of `fused_slots` with its native half
built. The order is base, head, head, base and so on; neighbours make a pair, so that a slow minute
of the machine meets both. Of a benchmark's median in each process (pytest-benchmark, CPU time) the
pairs' ratios are taken, and of those the interval in which their median lies with 95 % confidence.
Slower is what has all of that interval above its threshold, and again when it alone is repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.vllm_engine_throughput import median_interval

ROOT = Path(__file__).parents[1]
HISTORY = ROOT / "bench" / "results" / "history"
SHORT_US = 20.0
THRESHOLD, SHORT_THRESHOLD = 0.05, 0.10
"""What a median may grow by: of benchmarks that take SHORT_US or more, and of shorter ones."""

PYTEST = ("-q", "-p", "no:cacheprovider", "--benchmark-max-time=0.1", "--benchmark-min-rounds=20",
          "--benchmark-timer=time.process_time")  # fmt: skip
SETTINGS = ("python_files=bench_*.py", "python_functions=bench_*", "filterwarnings=")


class Side:
    """One revision: its package beside this tree's benchmarks, and what was measured of it.

    Args:
        name: for messages.
        folder: where it is put together; empty.
        package: the folder that holds the revision's `fused_slots` and setup.py.
    """

    def __init__(self, name: str, folder: Path, package: Path) -> None:
        self.name, self.folder = name, folder
        ours = shutil.ignore_patterns("*.so", "__pycache__", "results", ".cache")
        for source in (package / "fused_slots", ROOT / "bench", ROOT / "tests"):
            shutil.copytree(source, folder / source.name, ignore=ours)
        shutil.copy(package / "setup.py", folder)
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, folder)
        with contextlib.suppress(SystemExit):  # then appends are staged in Python, as it is said
            self._run("setup.py", "-q", "build_ext", "--inplace")
        script = (
            "import fused_slots; from fused_slots.host import rows; "
            "print(fused_slots.__file__, rows.host_half())"
        )
        imported, self.half = self._run("-c", script).split()
        if not Path(imported).is_relative_to(folder):
            raise SystemExit(f"{name}: {imported} would be measured instead of {folder}")

    def measure(
        self, options: argparse.Namespace, only: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Median microseconds of every benchmark selected, or named, from a fresh process."""
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        if options.gpu:
            chosen = ["--device", options.device]
            chosen += ["--select", options.select] if only is None else ["--only", *only]
            self._run("-m", "bench.regress_gpu", "--json", str(result), *chosen)
            medians: dict[str, float] = json.loads(result.read_text())
            return medians
        select = options.select if only is None else expression(only)
        settings = [word for setting in SETTINGS for word in ("-o", setting)]
        command = ["-m", "pytest", "bench", *PYTEST, *settings, "-k", select]
        self._run(*command, f"--benchmark-json={result}")
        entries = json.loads(result.read_text())["benchmarks"]
        return {entry["name"]: entry["stats"]["median"] * 1e6 for entry in entries}

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{self.name}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout


def unpack(revision: str, folder: Path) -> Path:
    """The tree of a revision of this repository."""
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


Pairs = dict[str, list[tuple[float, float]]]
"""Base and head, microseconds, by benchmark."""


def expression(names: Sequence[str]) -> str:
    """pytest's -k for these benchmarks: it selects by words, and so may select others too."""
    words = {" and ".join(re.findall(r"\w[\w+]*", name)) for name in names}
    return " or ".join(f"({each})" for each in sorted(words))


def measure_pairs(
    sides: tuple[Side, Side], options: argparse.Namespace, only: Sequence[str] | None = None
) -> Pairs:
    pairs: Pairs = {}
    for pair in range(options.pairs):
        order = sides if pair % 2 == 0 else sides[::-1]
        found = {side.name: side.measure(options, only) for side in order}
        base, head = (found[side.name] for side in sides)
        for name in sorted(base.keys() & head.keys()):
            pairs.setdefault(name, []).append((base[name], head[name]))
        print(f"pair {pair + 1} of {options.pairs}", file=sys.stderr, flush=True)
    return pairs


def judge(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians, the ratio head / base with its interval, and whether head is slower or faster."""
    ratios = [head / base for base, head in pairs]
    base, head = (statistics.median(side) for side in zip(*pairs, strict=True))
    low, high = median_interval(ratios) or (0.0, float("inf"))
    threshold = THRESHOLD if base >= SHORT_US else SHORT_THRESHOLD
    return {
        "base_us": round(base, 2),
        "head_us": round(head, 2),
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "slower": low > 1 + threshold,
        "faster": high < 1 / (1 + threshold),
    }


def regressions(sides: tuple[Side, Side], options: argparse.Namespace) -> dict[str, Any]:
    """What each benchmark was judged to be; those found slower are measured once more, alone."""
    results = {name: judge(pairs) for name, pairs in measure_pairs(sides, options).items()}
    suspects = [name for name, result in results.items() if result["slower"]]
    if suspects:
        print(f"again: {', '.join(suspects)}", file=sys.stderr)
        again = measure_pairs(sides, options, suspects)
        results |= {name: judge(again[name]) for name in suspects}
    return results


def table(results: dict[str, Any]) -> str:
    lines = []
    for name, result in results.items():
        low, high = result["interval"]
        times = f"{result['base_us']:>11,.1f}{result['head_us']:>11,.1f} us"
        said = "SLOWER" * result["slower"] + "faster" * result["faster"]
        ratio = f"{result['ratio']:.3f} ({low:.3f} to {high:.3f})"
        lines.append(f"{name.removeprefix('bench_'):<46}{times}  {ratio}  {said}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    base = parser.add_mutually_exclusive_group(required=True)
    base.add_argument("--base", help="a revision of this repository")
    base.add_argument("--base-dir", type=Path, help="an unpacked tree of it")
    parser.add_argument("--pairs", type=int, default=6, help="six or more; default 6")
    parser.add_argument("--select", default="not beside", help="a pytest -k expression")
    parser.add_argument("--gpu", action="store_true", help="bench/regress_gpu.py on a CUDA device")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument(
        "--history", action="store_true", help=f"keep the result in {HISTORY.name}/"
    )
    options = parser.parse_args()
    if options.gpu and options.select == "not beside":
        options.select = ""
    known = machine(options)  # before it is measured: the tree may change meanwhile
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        package = options.base_dir or unpack(options.base, folder / "revision")
        sides = (Side("base", folder / "base", package), Side("head", folder / "head", ROOT))
        if sides[0].half != sides[1].half:
            raise SystemExit(f"base stages in {sides[0].half}, head in {sides[1].half}")
        results = regressions(sides, options)
    report = {**known, "half": sides[1].half, "results": results}
    print(table(results))
    slower = [name for name, result in results.items() if result["slower"]]
    said = f"{len(results)} benchmarks, {len(slower)} slower than {report['base']}"
    print(f"{said}; both stage in {report['half']}")
    if slower:
        print(f"slower: {', '.join(name.removeprefix('bench_') for name in slower)}")
    for path in [options.json] * bool(options.json) + [kept_as(report)] * options.history:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    if not results:
        print("nothing was measured", file=sys.stderr)
    return bool(slower) or not results


def kept_as(report: dict[str, Any]) -> Path:
    """A file of the history: when, on what, and which revision."""
    return HISTORY / f"{report['date'][:16].replace(':', '')}-{report['on']}-{report['head']}.json"


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """When, what and where was measured."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "on": options.device if options.gpu else "cpu",
        "base": revision(options.base) if options.base else "an unpacked tree",
        "head": revision("HEAD"),
        "pairs": options.pairs,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **{name: version(name) for name in ("numpy", "torch")},
    }


def revision(name: str) -> str:
    """A revision's short name, with "+" where the working tree differs from HEAD."""
    if not shutil.which("git"):
        return "unknown"
    command = ["git", "rev-parse", "--short", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return "unknown"
    command = ["git", "diff", "--quiet", "HEAD"]
    changed = name == "HEAD" and subprocess.run(command, cwd=ROOT, check=False).returncode
    return done.stdout.strip() + "+" * bool(changed)


if __name__ == "__main__":
    sys.exit(main())
