"""Decode throughput of vLLM engines with and without the plugin, in pairs of runs.

    python -m bench.vllm_engine_throughput --json FILE [--pairs 24] [--seconds 350]

Two processes hold the same engine of a model with 16 KV cache groups, one with vLLM's own block
tables and one with the plugin's; at any time one of all engines runs. A pair is one `generate` on
each side, the side that begins changing from pair to pair; rounds go over all configurations, so
that a slow minute of the machine meets all alike. Of the pairs' differences, as percentages of
vLLM's own throughput, the median is given with the interval in which it lies with 95% confidence,
whatever their distribution (order statistics). Where the interval holds zero the answer is "no
difference".
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from bench.vllm_engine_time import EngineFailed, Side, wait_for_engines
from bench.vllm_engine_worker import SIDES

MODEL = "gemma3_16_groups"
MODES = ("FULL_DECODE_ONLY", "eager", "FULL_DECODE_ONLY synchronous")
BATCHES = (1, 64)
CONFIDENCE = 0.95


def median_interval(values: list[float]) -> tuple[float, float] | None:
    """The order statistics between which the median lies with 95% confidence; None: too few.

    The number of values below the median is binomial (n, 1/2).
    """
    n, below = len(values), 0.0
    for k in range(n // 2 + 1):
        below += math.comb(n, k) / 2**n
        if 2 * below > 1 - CONFIDENCE:
            ordered = sorted(values)
            return (ordered[k - 1], ordered[n - k]) if k else None
    return None


def differences(rows: list[dict[str, float]]) -> list[float]:
    """Ours against vLLM's own, in percent, of each pair."""
    return [100 * (row["plugin"] / row["stock"] - 1) for row in rows]


def summary(result: dict[str, Any]) -> str:
    """One configuration in a line."""
    rows = result["pairs"]
    name = f"{result['mode']} batch {result['batch']}"
    if not rows:
        return f"{name}: nothing was run"
    medians = {side: statistics.median(row[side] for row in rows) for side in SIDES}
    interval = median_interval(differences(rows))
    said = "too few pairs"
    if interval is not None:
        verdict = "no difference" if interval[0] <= 0 <= interval[1] else "a difference"
        said = f"{interval[0]:+.2f} to {interval[1]:+.2f}%: {verdict}"
    return (
        f"{name}: {len(rows)} pairs, vLLM {medians['stock']:.1f} tokens/s, plugin "
        f"{medians['plugin']:.1f}; paired {statistics.median(differences(rows)):+.2f}%, {said}; "
        f"tokens equal in {result['tokens_equal']}"
    )


def run_pair(engines: dict[str, Side], result: dict[str, Any], swapped: bool, until: float) -> None:
    """One `generate` on each side.

    Raises:
        EngineFailed: one fails, or is not done in time.
    """
    order = SIDES[::-1] if swapped else SIDES
    answers = {side: engines[side].run("decode", result["batch"], until) for side in order}
    result["pairs"].append({side: answers[side]["tokens_per_second"] for side in SIDES})
    result["tokens_equal"] += answers["stock"]["tokens"] == answers["plugin"]["tokens"]


def measure(
    engines: dict[str, dict[str, Side]], results: list[dict[str, Any]], pairs: int, until: float
) -> None:
    """Rounds of one pair in every configuration, until they or the time are used up."""
    longest = 0.0
    for number in range(pairs):
        begin = time.monotonic()
        if begin + longest > until:
            return
        for result in results:
            if "error" in result:
                continue
            try:
                run_pair(engines[result["mode"]], result, number % 2 == 1, until)
            except EngineFailed as error:
                result["error"] = str(error)[-600:]
        longest = max(longest, time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("--pairs", type=int, default=24, help="of each configuration")
    parser.add_argument("--seconds", type=float, default=350, help="for everything")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    engines = {
        mode: {side: Side(side, MODEL, mode, options.logs, BATCHES) for side in SIDES}
        for mode in MODES
    }
    every = [side for sides in engines.values() for side in sides.values()]
    wait_for_engines(every, time.monotonic() + options.seconds / 2)
    print("engines:", [(s.mode, s.side, s.about.get("groups", s.about)) for s in every], flush=True)
    results = [
        {"mode": mode, "batch": batch, "pairs": [], "tokens_equal": 0}
        for mode in MODES
        for batch in BATCHES
    ]
    for result in results:
        about = {side: engines[result["mode"]][side].about for side in SIDES}
        result.update(about)
        if not all("groups" in said for said in about.values()):
            result["error"] = "an engine is not ready"
    measure(engines, results, options.pairs, until - 5)
    for side in every:
        side.process.kill()
    for result in results:
        print(summary(result), result.get("error", ""), flush=True)
    options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
