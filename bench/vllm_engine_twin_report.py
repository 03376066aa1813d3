"""What `vllm_engine_parallel.sh` found: tokens of each run's engines, and what their twins counted.

python -m bench.vllm_engine_twin_report --json FILE --results FOLDER --twins FOLDER --logs FOLDER
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from bench.vllm_engine_tokens import differing

SIDES = ("stock", "plugin", "twin")


def read_twins(folder: Path, run: str) -> dict[str, Any]:
    """The counts of all processes of a run, added up."""
    counts: Counter[str] = Counter()
    said: dict[str, Any] = {"processes": 0, "first": []}
    for file in sorted(folder.glob(f"{run}_twin_*.json")):
        found = json.loads(file.read_text())
        if not found.get("slot calls"):
            continue  # a process without a model runner
        said["processes"] += 1
        said["first"] += found.pop("first")
        said["status"] = found.pop("status")
        counts.update(found)
    return {**said, **counts}


def describe(run: str, results: Path, twins: Path, logs: Path) -> dict[str, Any]:
    """One run: which engines ended well, prompts whose tokens differ from vLLM's own tables'."""
    tokens = {}
    for side in SIDES:
        file = results / f"{run}_{side}.json"
        if file.exists():
            tokens[side] = json.loads(file.read_text())
    row: dict[str, Any] = {"run": run, "done": list(tokens)}
    if "stock" in tokens:
        stock = tokens["stock"]["tokens"]
        row["stock_first_pass_against_second"] = sum(
            a != b for a, b in zip(*stock[:2], strict=True)
        )
        for side in ("plugin", "twin"):
            if side in tokens:
                row[f"{side}_prompts_that_differ"] = differing(tokens["stock"], tokens[side])
    row["prompts"] = len(next(iter(tokens.values()))["tokens"][0]) if tokens else 0
    row["preemptions"] = {s: t["run_counts"].get("sched.preempt", 0) for s, t in tokens.items()}
    row["active"] = {
        side: (logs / f"{run}_{side}.log").read_text(errors="replace").count("tables are active")
        for side in SIDES[1:]
        if (logs / f"{run}_{side}.log").exists()
    }
    row["twin"] = read_twins(twins, run)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--twins", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    options = parser.parse_args()
    suffixes = tuple(f"_{side}" for side in SIDES)
    runs = {
        path.stem.rpartition("_")[0]
        for path in options.logs.glob("*.log")
        if path.stem.endswith(suffixes)
    }
    rows = [describe(run, options.results, options.twins, options.logs) for run in sorted(runs)]
    for row in rows:
        print(json.dumps(row))
    options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
