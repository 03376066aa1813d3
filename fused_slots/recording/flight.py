"""The flight recorder: a manager's last calls, kept until somebody asks for them as a file.

It stands between a manager and its backend, and is not there at all unless it was asked for. A
call's device inputs are gathered into one buffer by one launch behind it, in stream order; staged
writes are kept as the host packed them. Every `num_calls` calls the tables are copied on the
device, and what is older than the copy before that is forgotten: a file begins with those tables
and holds between `num_calls` and twice as many calls.

A call that is captured into a graph records itself on the device whenever the graph is replayed:
into a ring of its own, with the number of the last call that the host had made by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.backends.base import Step
from fused_slots.faults import InvalidArgumentError
from fused_slots.groups import PAD_SLOT_ID
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout
from fused_slots.recording.calls import Kind, input_sizes
from fused_slots.recording.kept import Inputs, Recorded, as_step, row_step, rows_of, surroundings
from fused_slots.recording.repeat import state_digests
from fused_slots.recording.schedule import Schedule
from fused_slots.recording.steps import Append
from fused_slots.recording.triggers import Triggers, write_file

if TYPE_CHECKING:
    from fused_slots.base_tables import BaseTables


class FlightRecorder:
    """The last calls of one manager.

    Args:
        tables: the manager; its calls are recorded from now on.
        num_calls: so many of them are kept at least, twice as many at most.
    """

    def __init__(self, tables: BaseTables, num_calls: int) -> None:
        backend = tables._backend
        self._tables, self._backend, self._layout = tables, backend, backend.layout
        self.num_calls = num_calls
        self._is_capturing = backend.is_capturing
        self._triggers = Triggers(tables, num_calls)
        self._captured: list[Recorded] = []
        self._first_capture = self._number = 0
        """Calls of the host before the first capture, and so far."""
        self._graphs = None
        if backend.device.type in ("cuda", "npu"):
            self._graphs = GraphRing(backend.layout, backend.device, num_calls)
        self.restart()
        self._step, self._map_slots, self._map_tokens, self._restore = (
            *(backend.step, backend.map_slots, backend.map_tokens),
            backend.restore,
        )
        hooks: dict[str, Callable[..., None]] = {
            "step": self._on_step,
            "map_slots": self._on_map_slots,
            "map_tokens": self._on_map_tokens,
            "restore": self._on_restore,
        }
        for name, hook in hooks.items():
            setattr(backend, name, hook)

    def restart(self) -> None:
        """Forget all calls; the recording begins with the tables as they are."""
        self._older: list[Recorded] = []
        self._newer: list[Recorded] = []
        self.torn = 0
        """Rows that were written with other columns than allocation blocks have."""
        self._older_tables = self._newer_tables = self._copy_tables()

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the recording takes now."""
        inputs = [recorded.inputs for recorded in (*self._older, *self._newer)]
        tensors = [*self._older_tables, *inputs]
        if self._newer_tables is not self._older_tables:
            tensors += self._newer_tables
        if self._graphs is not None:
            tensors.append(self._graphs.ring)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def save(self, path: str | Path, reason: str = "on demand") -> Path:
        """Wait for the device and write the recording.

        Raises:
            InvalidArgumentError: a graph is being captured.
            OSError: the file cannot be written; no folder is made.
        """
        if self._is_capturing():
            raise InvalidArgumentError(
                "save_recording", expected="no graph capture", actual="a capture in progress"
            )
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(2, "no such folder", str(path.parent))
        self.schedule(reason).save(path)
        return path

    def schedule(self, reason: str) -> Schedule:
        """The recording as it is now; waits for the device."""
        layout = self._layout
        first = self._number - len(self._older) - len(self._newer)
        calls: list[tuple[tuple[int, int], Recorded, Inputs]] = [
            ((number, -1), recorded, recorded.inputs)
            for number, recorded in enumerate((*self._older, *self._newer), start=first + 1)
        ]
        if self._graphs is not None:
            for host_calls, replay, call, inputs in self._graphs.replayed():
                needed = sum(input_sizes(*self._captured[call][:3], layout.max_num_reqs))
                # The device's count is kept from the first call behind the first capture on.
                host_calls = max(host_calls, self._first_capture)
                if host_calls >= first and len(inputs) >= needed:
                    calls.append(((host_calls, replay), self._captured[call], inputs))
            calls.sort(key=lambda call: call[0])
        replays = [replay for (_, replay), recorded, _ in calls if recorded.kind & Kind.GRAPH]
        rows, torn = rows_of(layout, *self._older_tables)
        torn += self.torn
        steps = [row_step(rows)] if rows else []
        steps += [as_step(layout, recorded, inputs) for _, recorded, inputs in calls]
        ids = (max(blocks) for s in steps for a in s.appends for blocks in a.block_ids if blocks)
        ranks = layout.context_parallel
        state = state_digests(self._tables)
        if not _fills_slots(calls) or bool((self._tables.slot_mappings == PAD_SLOT_ID).all()):
            del state["slots"]  # a dummy run may have padded them since
        if torn:
            state.clear()
        return Schedule.from_steps(
            steps,
            name="recorded",
            groups=layout.groups,
            max_num_reqs=layout.max_num_reqs,
            max_num_batched_tokens=layout.max_num_batched_tokens,
            num_blocks=max([layout.null_block_id or 0, *ids]) + 1,
            metadata={
                **surroundings(self._backend.name, str(self._backend.device)),
                "description": f"{len(calls)} calls of a manager, written {reason}",
                "reason": reason,
                "calls": len(calls),
                "calls_before": first,
                "calls_of_graphs_before": replays[0] if replays else 0,
                "calls_of_graphs": sum(recorded.kind & Kind.GRAPH > 0 for _, recorded, _ in calls),
                "rows_not_recorded": torn,
                "state": state,
            },
            settings={
                "widths": list(layout.widths),
                "context_parallel": [ranks.size, ranks.rank, ranks.interleave],
                "replay_window": layout.replay_window,
                "slot_dtype": str(layout.slot_dtype).removeprefix("torch."),
                "null_block_id": layout.null_block_id,
                "num_blocks": list(self._tables.layout.num_blocks),  # an engine tells them late
            },
        )

    def add_rows(self, appends: list[Append], torn: int) -> None:
        """Record writes that came past the manager, `torn` rows of which hold no whole blocks."""
        self.torn += torn
        self._add(Recorded(0, 0, 0, 0, 0, 0, None, appends))

    def _on_step(self, step: Step) -> None:
        self._step(step)
        kind = Kind.GATHERS.value if step.idx_mapping is not None else 0
        if step.tables_out is not None:
            kind |= 128
        self._record(kind, step, 0)

    def _on_map_slots(self, step: Step) -> None:
        self._map_slots(step)
        self._record(0, step, 0 if step.slots_out is None else step.slots_out.shape[1])

    def _record(self, kind: int, step: Step, slots_width: int) -> None:
        parts, num_entries, num_positions = [], 0, 0
        rows, starts, positions = step.idx_mapping, step.query_start_loc, step.positions
        if rows is not None:
            num_entries = rows.shape[0]
            if rows.dtype is torch.int64:
                kind |= 8
                rows = rows.view(torch.int32)
            parts.append(rows)
        if starts is not None:
            assert positions is not None
            kind |= 2
            parts.append(starts[: num_entries + 1])
            capacity = slots_width or self._layout.max_num_batched_tokens
            num_positions = min(positions.shape[0], capacity)
            parts.append(positions[:num_positions].view(torch.int32))
        if step.num_computed_tokens is not None:
            kind |= 16
            parts.append(step.num_computed_tokens[: self._layout.max_num_reqs])
        for flag, values in ((32, step.replay_start), (64, step.replay_len)):
            if values is not None:
                kind |= flag
                parts.append(values[:num_entries])
        sizes = (num_entries, num_positions, step.num_reqs_padded, step.num_tokens_padded)
        self._keep(Recorded(kind, *sizes, slots_width), parts, step.staged)

    def _on_map_tokens(
        self, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._map_tokens(rows, positions, out)
        kind, width, tokens = Kind.DRAFTS.value, out.shape[1], rows.shape[0]
        if out is self._backend.slot_mappings:
            kind, width = kind | Kind.INTO_STEPS, 0
        elif out is self._backend.draft_slot_mappings:
            width = 0
        if rows.dtype is torch.int64:
            kind |= 8
        parts = [rows.view(torch.int32), positions.view(torch.int32)]
        self._keep(Recorded(kind, tokens, tokens, 0, 0, width), parts, None)

    def _on_restore(self, rows: HostRows) -> None:
        self._restore(rows)
        self.restart()

    def _keep(self, recorded: Recorded, parts: list[torch.Tensor], staged: HostRows | None) -> None:
        if self._is_capturing():
            if self._graphs is not None:
                if not self._captured:
                    self._first_capture = self._number
                self._graphs.capture(len(self._captured), parts)
                self._captured.append(recorded._replace(kind=recorded.kind | Kind.GRAPH))
            return
        writes = None
        if staged is not None:
            packet = np.empty(staged.packet_size, dtype=np.int32)
            staged.pack(packet)
            writes = packet, staged.num_staged_rows
        # A buffer of its own even of one part, and written in stream order behind the call.
        inputs = torch.cat(parts) if parts else None
        self._add(recorded._replace(inputs=inputs, writes=writes))

    def _add(self, recorded: Recorded) -> None:
        self._newer.append(recorded)
        self._number += 1
        if self._captured and self._graphs is not None:
            self._graphs.host_calls.fill_(self._number)
        if len(self._newer) == self.num_calls:
            self._older, self._newer = self._newer, []
            self._older_tables, self._newer_tables = self._newer_tables, self._copy_tables()
        if reason := self._triggers.reason(self._number):
            write_file(self.save, reason)

    def _copy_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._backend.arena.clone(), self._backend.num_columns.clone()


class GraphRing:
    """What replays of graphs record, on the device: `num_calls` packets of the largest call."""

    def __init__(self, layout: TableLayout, device: torch.device, num_calls: int) -> None:
        rows, tokens = layout.max_num_reqs, layout.max_num_batched_tokens
        every = Kind.MAPS | Kind.WIDE_INDEX | Kind.COMPUTED | Kind.REPLAY_START | Kind.REPLAY_LEN
        size = 3 + max(sum(input_sizes(every, rows, tokens, rows)), 4 * tokens)
        self.ring = torch.full((num_calls, size), -1, dtype=torch.int32, device=device)
        self._clock = torch.zeros(2, dtype=torch.int32, device=device)
        self.host_calls = self._clock[:1]
        """Calls of the host so far."""
        self._replays = self._clock[1:]

    def capture(self, call: int, parts: Sequence[torch.Tensor]) -> None:
        """Make the graph that is being captured record a call whenever it is replayed."""
        number = torch.full((1,), call, dtype=torch.int32, device=self.ring.device)
        packet = torch.cat((number, self._clock, *parts))
        place = self._replays.remainder(len(self.ring)).long()
        length = min(packet.shape[0], self.ring.shape[1])
        self.ring[:, :length].index_copy_(0, place, packet[:length].unsqueeze(0))
        self._replays.add_(1)

    def replayed(self) -> Iterator[tuple[int, int, int, npt.NDArray[np.int32]]]:
        """Of each replay that is still there: the host's calls and the replays before it, the
        number of the captured call, and its inputs."""
        for line in self.ring.cpu().numpy():
            if line[0] >= 0:
                yield int(line[1]), int(line[2]), int(line[0]), line[3:]


def _fills_slots(calls: Sequence[tuple[Any, Recorded, Any]]) -> bool:
    """Whether what stands in `slot_mappings` comes from the last call."""
    last = calls[-1][1] if calls else None
    return last is not None and (
        last.kind & Kind.INTO_STEPS > 0 or (last.kind & Kind.MAPS > 0 and not last.slots_width)
    )
