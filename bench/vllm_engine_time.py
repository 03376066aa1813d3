"""Time per step of vLLM engines with and without the plugin, alternating on one idle GPU.

Two processes hold the same engine, one with vLLM's block tables and one with the plugin's, each
with vLLM's own runner, scheduler and asynchronous scheduling in process. They take turns: at any
time one generates and the other waits. Models are small, so that a step is bound by the host, and
have as many KV cache groups as their name says. Requests decode greedily; prompts are short.

- plain: `LLM.generate` of a batch with nothing else; tokens per second.
- host: the runner's preparation (from the begin of `execute_model` to the end of `prepare_attn`),
  its parts, and the time between two steps; only steps that decode the whole batch.
- device: the same parts by CUDA events, each step queued behind a sleeping kernel, so that gaps of
  the host do not count.
- profile: kernels and copies of whole steps, as the profiler sees them.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from bench.vllm_engine_worker import BATCHES, SIDES, serve

CONFIGS = (
    ("gemma3_16_groups", "FULL_DECODE_ONLY"),
    ("gemma3_6_groups", "FULL_DECODE_ONLY"),
    ("gemma3_16_groups", "eager"),
    ("gemma3_6_groups", "eager"),
)
NEW_TOKENS = {"plain": 192, "host": 128, "device": 64, "profile": 48, "decode": 160}
MOST_ROUNDS = 12
LAST_SECONDS = 25
"""Kept for the device's time and, last because the profiler stays attached, the profile."""


class EngineFailed(Exception):
    """An engine's process ended, raised, or said nothing in time."""


class Side:
    """One engine in its own process; `about` is what it says of itself when it is ready."""

    def __init__(
        self, side: str, model: str, mode: str, logs: Path, batches: tuple[int, ...] = BATCHES
    ) -> None:
        self.side, self.model, self.mode, self.batches = side, model, mode, batches
        self.log = logs / f"time_{model}_{mode.replace(' ', '_')}_{side}.log"
        self.stubs: list[str] = []
        self.about: dict[str, Any] = {}
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve,
            args=(
                *(theirs, self.side, self.model, self.mode, tuple(self.stubs), str(self.log)),
                self.batches,
            ),
        )
        self.process.start()
        theirs.close()

    def receive(self, until: float) -> Any:
        """What the engine's process says next.

        Raises:
            EngineFailed: it failed, or said nothing in time.
        """
        if not self.connection.poll(max(until - time.monotonic(), 0.1)):
            self.process.kill()
            raise EngineFailed(f"{self.log.stem}: no answer in time")
        try:
            word, value = self.connection.recv()
        except (EOFError, OSError):
            word, value = "failed", "the process ended"
        if word == "failed":
            raise EngineFailed(f"{self.log.stem}: {value}")
        return value

    def starts_again(self) -> bool:
        """Read the first message; a module that is missing is stubbed, once, in a new process."""
        try:
            self.about = {**self.receive(time.monotonic()), "stubs": self.stubs}
        except EngineFailed as error:
            self.about = {"error": str(error)}
            missing = _missing_modules(str(error)) or _missing_modules(self.log.read_text())
            if missing and missing[-1] not in self.stubs:
                self.stubs.append(missing[-1])
                self._start()
                return True
        return False

    def run(self, kind: str, batch: int, until: float) -> Any:
        """One call of `generate`."""
        new_tokens = NEW_TOKENS[kind]
        if kind == "decode" and self.mode.startswith("eager"):
            new_tokens //= 6  # a step takes ten times as long
        return self.ask({"kind": kind, "batch": batch, "new_tokens": new_tokens}, until)

    def ask(self, question: Any, until: float) -> Any:
        """What the engine's process answers.

        Raises:
            EngineFailed: it failed, ended, or said nothing in time.
        """
        try:
            self.connection.send(question)
        except OSError as error:
            raise EngineFailed(f"{self.log.stem}: {error}") from error
        return self.receive(until)


def wait_for_engines(sides: Iterable[Side], until: float) -> None:
    """Wait until each engine is ready or has failed."""
    pending = {side.connection: side for side in sides}
    while pending and time.monotonic() < until:
        for connection in wait(list(pending), timeout=1):
            side = pending.pop(connection)
            if side.starts_again():
                pending[side.connection] = side


def _missing_modules(text: str) -> list[str]:
    found = re.findall(r"ModuleNotFoundError: No module named '(\w+)", text)
    return [name for name in found if name != "vllm"]


class Comparison:
    """One model in one mode, both sides."""

    def __init__(self, model: str, mode: str, logs: Path) -> None:
        self.name = f"{model} {mode}"
        self.sides = {side: Side(side, model, mode, logs) for side in SIDES}
        self.result: dict[str, Any] = {"model": model, "mode": mode, "runs": []}

    def measure(self, until: float) -> None:
        """Alternate until the time is used up; at least once.

        Raises:
            EngineFailed: one of the two is not ready, or fails.
        """
        self.result.update({name: side.about for name, side in self.sides.items()})
        if not all("groups" in side.about for side in self.sides.values()):
            errors = [side.about.get("error", "") for side in self.sides.values()]
            raise EngineFailed(f"not ready: {errors}")
        rounds = 0
        longest = 0.0
        while not rounds or (
            rounds < MOST_ROUNDS and time.monotonic() + longest < until - LAST_SECONDS
        ):
            begin = time.monotonic()
            for kind in ("plain", "host"):
                for batch in BATCHES:
                    self._both(kind, batch, rounds % 2 == 1, until)
            longest = max(longest, time.monotonic() - begin)
            rounds += 1
        for kind in ("device", "profile"):
            for batch in BATCHES:
                try:
                    self._both(kind, batch, False, until)
                except EngineFailed as error:
                    self.result.setdefault("errors", []).append(str(error))

    def _both(self, kind: str, batch: int, swapped: bool, until: float) -> None:
        row: dict[str, Any] = {"kind": kind, "batch": batch}
        for side in reversed(SIDES) if swapped else SIDES:
            row[side] = self.sides[side].run(kind, batch, until)
        tokens = [row[side].pop("tokens") for side in SIDES]
        row["tokens_equal"] = tokens[0] == tokens[1]
        self.result["runs"].append(row)

    def finish(self) -> None:
        """Faults that the tables counted."""
        for name, side in self.sides.items():
            self.result[name]["end"] = side.ask(None, time.monotonic() + 10)

    def stop(self) -> None:
        for side in self.sides.values():
            side.process.kill()


SHOWN = {
    "plain": ("tokens_per_second",),
    "host": ("block_tables_mean_us", "preparation_us", "between_steps_us"),
    "device": ("block_tables_mean_us", "preparation_us"),
    "profile": ("kernels_and_copies", "device_us"),
}


def show(result: dict[str, Any]) -> None:
    """The quantities that matter: medians over the rounds, and the rounds' ratios."""
    runs = result["runs"]
    print(f"{result['model']} {result['mode']}: {result['plugin'].get('groups')} groups, tokens of")
    print(f"  {sum(run['tokens_equal'] for run in runs)} of {len(runs)} runs are equal")
    for error in (*result.get("errors", ()), result.get("error", "none")):
        print("  errors:", error[-300:])
    for kind, names in SHOWN.items():
        for batch in BATCHES:
            rows = [run for run in runs if (run["kind"], run["batch"]) == (kind, batch)]
            for name in names if rows else ():
                stock, ours = ([row[side][name] for row in rows] for side in SIDES)
                ratios = [a / b for a, b in zip(stock, ours, strict=True) if b]
                print(
                    f"  {kind} batch {batch} {name}: stock {statistics.median(stock):.1f} plugin "
                    f"{statistics.median(ours):.1f} ratio {min(ratios):.3f}..{max(ratios):.3f}"
                )
    plain = [run["plugin"] for run in runs if run["kind"] == "plain"]
    print("  launches and steps:", [(run.get("launches"), run["steps"]) for run in plain][:4])
    print("  faults:", result["plugin"].get("end"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, help="only print a result")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("--go", type=Path, help="measure when this file exists")
    parser.add_argument("--seconds", type=float, default=300, help="for everything")
    options = parser.parse_args()
    if options.show:
        for result in json.loads(options.show.read_text()):
            show(result)
        return
    until = time.monotonic() + options.seconds
    comparisons = [Comparison(model, mode, options.logs) for model, mode in CONFIGS]
    sides = [side for comparison in comparisons for side in comparison.sides.values()]
    wait_for_engines(sides, time.monotonic() + options.seconds / 2)
    print("time: engines are ready:", sum("groups" in side.about for side in sides), flush=True)
    while options.go and not options.go.exists():
        time.sleep(0.2)
    for number, comparison in enumerate(comparisons):
        share = (until - time.monotonic()) / (len(comparisons) - number)
        try:
            comparison.measure(time.monotonic() + share - 3)
            comparison.finish()
        except EngineFailed as error:
            comparison.result["error"] = str(error)
        comparison.stop()
        print(f"time: {comparison.name}: {len(comparison.result['runs'])} runs", flush=True)
        options.json.write_text(json.dumps([c.result for c in comparisons], indent=1))


if __name__ == "__main__":
    main()
