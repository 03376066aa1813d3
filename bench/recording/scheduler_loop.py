"""Drive vLLM's scheduler step by step, with the rules of its v2 model runner in plain Python.

The rules (rows, batch order, positions) are the runner's: the last row freed is used first, a
preempted request loses its row, decodes stand before prefills, and the number of computed tokens
steps back by the rejected draft tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from bench.recording.scenarios import RecordingError, Scenario
from bench.recording.scheduler_model import Traffic, build_scheduler, groups_of
from fused_slots.recording.schedule import Append, ScheduleStep

_ACCEPTANCE = 0.6
_MAX_IDLE = 100


@dataclass
class Row:
    """What the runner remembers of a live request."""

    index: int
    num_computed: int
    prefill_len: int


class Rows:
    """The runner's rows: which request has which, and how far it is."""

    def __init__(self, max_num_reqs: int) -> None:
        self._free = list(range(max_num_reqs))
        self.live: dict[str, Row] = {}

    def apply(self, output: SchedulerOutput) -> tuple[Append, ...]:
        """Free and assign rows; the appends that the runner would make."""
        gone = output.finished_req_ids | (output.preempted_req_ids or set())
        for request_id in sorted(gone & self.live.keys()):
            self._free.append(self.live.pop(request_id).index)
        appends = []
        for new in output.scheduled_new_reqs:
            row = Row(self._free.pop(), new.num_computed_tokens, len(new.prefill_token_ids))
            self.live[new.req_id] = row
            appends.append(Append(row.index, new.block_ids, overwrite=True))
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                appends.append(Append(self.live[request_id].index, block_ids, overwrite=False))
        return tuple(appends)


class SchedulerLoop:
    """Runs a scenario; `counts` says what happened in it."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._scheduler = build_scheduler(scenario)
        self._traffic = Traffic(scenario, self._scheduler)
        self._random = np.random.default_rng((scenario.seed, 1))
        self._rows = Rows(scenario.max_num_reqs)
        self._requests: dict[str, Request] = {}
        self._events: list[str] = []
        self.groups = groups_of(self._scheduler)
        self.counts = dict.fromkeys(
            (
                *("steps", "tokens", "max_batch", "requests_finished", "aborts"),
                *("chunked_prefills", "prefix_hits", "prefix_hit_tokens", "preemptions"),
                *("resumptions", "drafts_accepted", "drafts_rejected"),
            ),
            0,
        )

    def run(self) -> Iterator[ScheduleStep]:
        """The steps that schedule tokens; the runner does nothing with its tables in others.

        Raises:
            RecordingError: the traffic ran dry, or runner and scheduler disagree.
        """
        in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        max_in_flight = 1 if self._scenario.asynchronous else 0
        idle = 0
        while self.counts["steps"] < self._scenario.num_steps:
            self._add_requests()
            output = self._scheduler.schedule()
            self._note_events(output)
            appends = self._rows.apply(output)
            self._check_computed(output)
            order = batch_order(output, decode_query_len=1 + self._scenario.draft_tokens)
            if order:
                yield self._step(output, appends, order)
            idle = 0 if order else idle + 1
            if idle > _MAX_IDLE:
                raise RecordingError(
                    f"scenario {self._scenario.name}",
                    expected=f"{self._scenario.num_steps} steps of traffic",
                    actual=f"{self.counts['steps']}, then {idle} schedules without a token",
                )
            in_flight.append((output, self._execute(output, order)))
            while len(in_flight) > max_in_flight:
                self._update(*in_flight.popleft())

    def _add_requests(self) -> None:
        for request in self._traffic.arrivals(self._scheduler.get_request_counts()[1]):
            self._requests[request.request_id] = request
            self._scheduler.add_request(request)

    def _note_events(self, output: SchedulerOutput) -> None:
        for request_id in sorted(output.finished_req_ids, key=int):
            self._traffic.finished(list(self._requests.pop(request_id).all_token_ids))
            self._note("requests_finished", f"finished {request_id}")
        for request_id in sorted(output.preempted_req_ids or (), key=int):
            self._note("preemptions", f"preempted {request_id}")
        for new in output.scheduled_new_reqs:
            if self._requests[new.req_id].num_preemptions:
                self._note("resumptions", f"resumed {new.req_id}")
            if hit := new.num_computed_tokens:
                self._note("prefix_hits", f"prefix hit {hit} of {new.req_id}")
                self.counts["prefix_hit_tokens"] += hit

    def _note(self, count: str, event: str) -> None:
        self.counts[count] += 1
        self._events.append(event)

    def _check_computed(self, output: SchedulerOutput) -> None:
        """The runner's positions and the scheduler's must agree, or lag by rejected drafts."""
        cached = output.scheduled_cached_reqs
        may_lag = self._scenario.asynchronous and self._scenario.draft_tokens > 0
        for request_id, expected in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            actual = self._rows.live[request_id].num_computed
            if actual != expected and not (may_lag and actual < expected):
                raise RecordingError(
                    f"num_computed_tokens of {request_id}",
                    expected=f"{expected}",
                    actual=f"{actual}",
                )

    def _step(
        self, output: SchedulerOutput, appends: tuple[Append, ...], order: list[str]
    ) -> ScheduleStep:
        rows = [self._rows.live[request_id] for request_id in order]
        scheduled = [output.num_scheduled_tokens[request_id] for request_id in order]
        held = [self._scheduler.kv_cache_manager.get_block_ids(request) for request in order]
        events, self._events = tuple(self._events), []
        self.counts["steps"] += 1
        self.counts["tokens"] += sum(scheduled)
        self.counts["max_batch"] = max(self.counts["max_batch"], len(order))
        num_computed_tokens = np.zeros(self._scenario.max_num_reqs, np.int32)
        for row in rows:
            num_computed_tokens[row.index] = row.num_computed
        return ScheduleStep(
            appends=appends,
            request_ids=np.array(order, np.int32),
            idx_mapping=np.array([row.index for row in rows], np.int32),
            query_start_loc=np.cumsum([0, *scheduled], dtype=np.int32),
            positions=np.concatenate(
                [row.num_computed + np.arange(n) for row, n in zip(rows, scheduled, strict=True)]
            ),
            num_computed_tokens=num_computed_tokens,
            expected_blocks=tuple(
                tuple(np.array(blocks, np.int32) for blocks in group)
                for group in zip(*held, strict=True)
            ),
            events=events,
        )

    def _execute(self, output: SchedulerOutput, order: list[str]) -> ModelRunnerOutput:
        """Random tokens in place of the model; moves the rows on as the runner does."""
        sampled: list[list[int]] = []
        for request_id in order:
            row = self._rows.live[request_id]
            row.num_computed += output.num_scheduled_tokens[request_id]
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            if row.num_computed < row.prefill_len:
                self.counts["chunked_prefills"] += 1
                sampled.append([])
                continue
            guesses = self._random.random(drafts) < _ACCEPTANCE
            accepted = int(np.cumprod(guesses).sum())
            row.num_computed -= drafts - accepted
            self.counts["drafts_accepted"] += accepted
            self.counts["drafts_rejected"] += drafts - accepted
            sampled.append(self._traffic.tokens(accepted + 1))
        return ModelRunnerOutput(
            req_ids=order,
            req_id_to_index={request_id: index for index, request_id in enumerate(order)},
            sampled_token_ids=sampled,
        )

    def _update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        every = self._scenario.abort_every
        running = self._scheduler.running
        if every and running and self.counts["steps"] % every == 0:
            victim = running[int(self._random.integers(len(running)))].request_id
            self._scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
            self._note("aborts", f"aborted {victim}")
        self._scheduler.update_from_output(output, result)
        if self._scenario.draft_tokens and not self._scenario.asynchronous:
            drafts = [self._traffic.tokens(self._scenario.draft_tokens) for _ in result.req_ids]
            self._scheduler.update_draft_token_ids(DraftTokenIds(result.req_ids, drafts))


def batch_order(output: SchedulerOutput, decode_query_len: int) -> list[str]:
    """Request ids as the v2 runner puts them: with drafts, then full decodes, then by length."""

    def key(request_id: str) -> tuple[bool, bool, int]:
        num_tokens = output.num_scheduled_tokens[request_id]
        has_drafts = bool(output.scheduled_spec_decode_tokens.get(request_id))
        return not has_drafts, num_tokens != decode_query_len, num_tokens

    return sorted(output.num_scheduled_tokens, key=key)
