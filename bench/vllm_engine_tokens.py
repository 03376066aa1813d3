"""Tokens of vLLM engines with the plugin against those without, from the files of engine runs.

python -m bench.vllm_engine_tokens --json FILE --results FOLDER --logs FOLDER

A run is NAME_stock or NAME_plugin. That the plugin was active, and in how many launches each step
went to the device, is read from the log of the engine's own process.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path
from typing import Any

ACTIVE = re.compile(r"pid=(\d+)\).*fused_slots block tables are active")
LAUNCHES = re.compile(r"fused_slots launches: (\{.*?\}) preemptions: (\d+) process (\d+)")


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[int]:
    """Prompts whose tokens differ, for each pass."""
    return [
        sum(a != b for a, b in zip(first, second, strict=True))
        for first, second in zip(one["tokens"], other["tokens"], strict=True)
    ]


def compare(name: str, results: Path, logs: Path) -> dict[str, Any]:
    """One stock run and the one with the plugin, or the broken control."""
    paths = [results / f"{run}.json" for run in (f"{name.rsplit('_', 1)[0]}_stock", name)]
    missing = [path.stem for path in paths if not path.exists()]
    if missing:
        return {"run": name, "missing": missing}
    expected, found = (json.loads(path.read_text()) for path in paths)
    log = (logs / f"{name}.log").read_text(errors="replace")
    launches, preemptions, process = (LAUNCHES.findall(log) or [("None", "0", "")])[-1]
    return {
        "run": name,
        "vllm": found["version"],
        "mode": found["mode"],
        "dtype": found["opts"][-1] if found["opts"] else "bfloat16",
        "prompts": len(found["tokens"][0]),
        "prompts_that_differ": differing(expected, found),
        "generated_tokens": sum(len(tokens) for one in found["tokens"] for tokens in one),
        "active_lines_of_the_engine": ACTIVE.findall(log).count(process),
        "steps_by_launches": ast.literal_eval(launches),
        "preemptions": int(preemptions),
    }


def is_right(row: dict[str, Any]) -> bool:
    """Equal tokens, one launch a step, preemptions if blocks are few; a control's tokens differ."""
    if "missing" in row:
        return False
    if row["run"].endswith("_control"):
        return all(row["prompts_that_differ"])
    steps = row["steps_by_launches"]
    # Steps without launches are dummy runs and steps without tokens.
    return (
        not any(row["prompts_that_differ"])
        and row["active_lines_of_the_engine"] == 1
        and steps is not None
        and set(steps) <= {0, 1}
        and (row["preemptions"] > 0 or "_few" not in row["run"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    options = parser.parse_args()
    names = {path.stem for path in options.logs.glob("*.log")}
    names |= {name.replace("_stock", "_plugin") for name in names if name.endswith("_stock")}
    rows = [
        compare(name, options.results, options.logs)
        for name in sorted(names)
        if name.endswith(("_plugin", "_control")) and not name.startswith("time_")
    ]
    for row in rows:
        row["right"] = is_right(row)
        print("tokens:", *(f"{name}={value}" for name, value in row.items() if name != "vllm"))
    options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
