"""A seeded engine's life that drives a manager and both oracles together.

Fuzz, soak and demonstration in one: each step admits, grows, preempts, resumes and finishes
requests, runs one batch through the manager and compares every cell and slot. A failure raises
with the one command that reproduces it. As a module:

    python -m tests.simulator --seed 123 --steps 40 --backend cpu
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from unittest import mock

from fused_slots import AscendBlockTables
from tests.checker import Checker
from tests.configuration import FEATURES, NEW, Config, Target, make_manager, random_config
from tests.engine import Engine, Request
from tests.guards import check_bands, make_guarded
from tests.model import Batch, Mismatch
from tests.odd_calls import OddDriver


def make_interpreted(config: Config) -> AscendBlockTables:
    """A manager whose kernels run in Triton's interpreter; needs TRITON_INTERPRET=1."""
    with mock.patch.dict(os.environ, {"FUSED_SLOTS_BACKEND": "interpreter"}):
        return make_manager(config)


TARGETS = {
    "cpu": Target("cpu", make_manager, features=FEATURES | NEW),
    "interpreter": Target("interpreter", make_interpreted, features=FEATURES | NEW),
    "cpu-guarded": Target(
        "cpu-guarded", make_guarded, features=FEATURES | NEW, after_step=check_bands
    ),
    "cuda": Target(
        "cuda", partial(make_manager, device="cuda"), device="cuda", features=FEATURES | NEW
    ),
    "npu": Target("npu", partial(make_manager, device="npu"), device="npu"),
}
"""Managers by the name that --backend takes; other targets may be added."""


class SimulationError(Mismatch):
    """A step failed; the message ends with the command that reproduces it."""


@dataclass
class Report:
    """What simulated lives have done; the digest depends on the seeds alone."""

    steps: int = 0
    events: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    tokens_owned: int = 0
    digest: str = ""

    def add(self, other: Report) -> None:
        self.steps += other.steps
        self.events += other.events
        self.compared += other.compared
        self.tokens_owned += other.tokens_owned
        self.digest = hashlib.sha256((self.digest + other.digest).encode()).hexdigest()


class Simulator:
    """One life: a random configuration and the steps of an engine that uses it."""

    def __init__(self, target: Target, seed: int, size: str = "normal") -> None:
        self.rng = rng = Random(seed)
        self.config = random_config(rng, size, target)
        self.engine = Engine(self.config, rng)
        manager = target.make(self.config)
        self.check = Checker(target, self.config, manager)
        self.driver = OddDriver(target, self.config, self.check, rng)
        self.events = self.driver.events

    def step(self) -> None:
        """One engine step and, now and then, calls that no healthy engine would make."""
        self._requests_come_and_go()
        self._rewind()
        scheduled = self._schedule()
        batch, owners = self._batch(scheduled)
        slots = self.driver.run(batch, clean=True)
        self._claim_slots(batch, owners, slots)
        self._advance(scheduled)
        self.driver.odd_calls(batch, self.engine.free_rows)
        self.driver.inspect()

    def report(self, steps: int) -> Report:
        seen = self.engine.owners.tokens_seen
        return Report(steps, self.events, self.check.compared, seen, self.check.digest)

    def _requests_come_and_go(self) -> None:
        engine, rng = self.engine, self.rng
        for request in list(engine.running):
            if request.finished or rng.random() < 0.02:
                self._vacate(request, engine.stop)
                self.events["finish"] += 1
            elif rng.random() < 0.03:
                self._vacate(request, engine.preempt)
                self.events["preempt"] += 1
        while engine.free_rows and rng.random() < 0.6:
            resumed = bool(engine.waiting) and rng.random() < 0.7
            request = engine.waiting.pop(0) if resumed else engine.new_request()
            self.events["resume" if resumed else "admit"] += 1
            donors = [donor for donor in engine.running if donor.computed]
            engine.place(request)
            if donors and rng.random() < 0.35 and engine.hit_prefix(request, rng.choice(donors)):
                self.events["prefix hit"] += 1
                self.events["replay"] += bool(request.replay_start)
        if rng.random() < 0.1:
            rng.shuffle(engine.running)
            self.events["shuffle"] += 1

    def _vacate(self, request: Request, leave: Callable[[Request], None]) -> None:
        row = request.row
        leave(request)
        self.driver.vacate(row)

    def _rewind(self) -> None:
        """Take back some tokens of some requests, as after a failed load or a rejected draft."""
        if not self.driver.offers("row_writes"):
            return
        for request in self.engine.running:
            floor = self.engine.first_rewindable(request)
            if floor <= request.computed and not request.fresh and self.rng.random() < 0.1:
                computed = self.rng.randint(floor, request.computed)
                self.driver.write(request.row, *self.engine.rewind(request, computed))

    def _schedule(self) -> list[tuple[Request, int]]:
        """Requests of this step with their token counts, blocks dealt and staged."""
        rng, engine = self.rng, self.engine
        budget = self.config.capacity
        scheduled: list[tuple[Request, int]] = []
        for request in list(engine.running):
            if request not in engine.running or request.finished or not budget:
                continue
            if rng.random() < 0.1:
                self.events["skipped request"] += 1
                continue
            count = min(self._num_tokens(request), budget)
            if self._grow(request, request.computed + count, [r for r, _ in scheduled]):
                scheduled.append((request, count))
                budget -= count
        return scheduled

    def _num_tokens(self, request: Request) -> int:
        left = request.prompt_len - request.computed
        if left > 0:
            chunk = self.rng.randint(1, left)
            self.events["whole prefill" if chunk == left else "chunked prefill"] += 1
            return chunk
        drafts = self.rng.choice((0, 0, 1, 3))
        self.events["speculative" if drafts else "decode"] += 1
        return min(1 + drafts, request.target_len - request.computed)

    def _grow(self, request: Request, num_tokens: int, keep: list[Request]) -> bool:
        """Deal and stage the blocks that a request lacks; preempt others for them."""
        engine = self.engine
        missing = engine.missing_blocks(request, num_tokens)
        while (ids := engine.pools.take(missing)) is None:
            victims = [r for r in engine.running if r is not request and r not in keep]
            if not victims:
                return False
            self._vacate(self.rng.choice(victims), engine.preempt)
            self.events["preempt for blocks"] += 1
        whole_row = [old + new for old, new in zip(request.blocks, ids, strict=True)]
        self.driver.stage(request.row, whole_row if request.fresh else ids, request.fresh)
        request.blocks, request.fresh = whole_row, False
        return True

    def _batch(self, scheduled: list[tuple[Request, int]]) -> tuple[Batch, list[Request | None]]:
        """The batch's arrays and, per batch entry, the request it belongs to."""
        idx: list[int] = []
        starts, replay = [0], []
        positions: list[int] = []
        owners: list[Request | None] = []
        for request, count in scheduled:
            owners.append(request)
            idx.append(request.row)
            positions += range(request.computed, request.computed + count)
            starts.append(len(positions))
            replay.append(request.replay_start)
        computed = [
            self.rng.randint(0, 2 * self.config.max_model_len)
            for _ in range(self.config.max_num_reqs)
        ]
        for request in self.engine.running:
            computed[request.row] = request.computed
        needs_replay = any(replay) and self.config.replay_window
        lengths = None
        if self.driver.offers("replay_len") and any(replay) and self.rng.random() < 0.5:
            window = self.config.replay_window
            lengths = [window if start else self.rng.randint(-2, 0) for start in replay]
            self.events["replay lengths"] += 1
        batch = Batch(
            idx,
            starts,
            positions,
            replay if needs_replay or lengths or self.rng.random() < 0.3 else None,
            computed if self.rng.random() < 0.7 else None,
            lengths,
        )
        return self.driver.decorate(batch, owners)

    def _claim_slots(
        self, batch: Batch, owners: list[Request | None], slots: list[list[int]]
    ) -> None:
        """No two live tokens have one slot, whatever formula gave the slots."""
        for g, group in enumerate(self.config.groups):
            if group.slot_mapping_mode.name == "NONE":
                continue
            for b, request in enumerate(owners):
                if request is None:
                    continue
                for t in range(batch.query_start_loc[b], batch.query_start_loc[b + 1]):
                    position = batch.positions[t]
                    self.engine.owners.write(
                        g, slots[g][t], request.uid, position, self.engine.pools
                    )

    def _advance(self, scheduled: list[tuple[Request, int]]) -> None:
        for request, count in scheduled:
            decoding = request.computed >= request.prompt_len
            accepted = self.rng.randint(1, count) if decoding else count
            self.events["rejected drafts"] += decoding and accepted < count
            request.computed += accepted


def simulate(target: Target, seed: int, steps: int, size: str = "normal") -> Report:
    """One life of `steps` steps.

    Raises:
        SimulationError: a difference; the message ends with the command that reproduces it.
    """
    done = 0
    try:
        simulator = Simulator(target, seed, size)
        while done < steps:
            done += 1
            simulator.step()
            if target.after_step is not None:
                target.after_step(simulator.check.manager)
        simulator.driver.finish()
    except Exception as error:
        command = (
            f"python -m tests.simulator --seed {seed} --steps {done} --backend {target.name}"
            + (f" --size {size}" if size != "normal" else "")
        )
        raise SimulationError(
            f"step {done}: {type(error).__name__}: {error}\nreproduce: {command}"
        ) from error
    return simulator.report(steps)


def simulate_lives(
    target: Target, first_seed: int, total_steps: int, steps: int = 40, size: str = "normal"
) -> Report:
    """Lives with consecutive seeds until `total_steps` steps are done."""
    report, seed = Report(), first_seed
    while report.steps < total_steps:
        report.add(simulate(target, seed, min(steps, total_steps - report.steps), size))
        seed += 1
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="steps of one life")
    parser.add_argument("--lives", type=int, default=1, help="consecutive seeds")
    parser.add_argument("--backend", choices=sorted(TARGETS), default="cpu")
    parser.add_argument("--size", choices=("normal", "small"), default="normal")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    total = options.steps * options.lives
    try:
        report = simulate_lives(
            TARGETS[options.backend], options.seed, total, options.steps, options.size
        )
    except SimulationError as error:
        print(error, file=sys.stderr)
        return 1
    seconds = time.perf_counter() - started
    print(f"{report.steps} steps, 0 mismatches, {seconds:.1f} s, digest {report.digest}")
    for name, count in sorted(report.events.items()):
        print(f"  {name}: {count}")
    print(f"  slots owned: {report.tokens_owned}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
