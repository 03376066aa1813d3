"""The manager's operations as launches of the Ascend kernels, wherever these run.

`slots_on_ascend` maps slots and drafts, and graphs may capture it; `step_on_ascend` does
everything that writes or gathers tables, alone or together, in one launch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from fused_slots.backends.ascend.arguments import kernel_of
from fused_slots.backends.ascend.plan import (
    MAX_GRID,
    MAX_GROUPS,
    AscendPlan,
    are_long,
    plan_launch,
)
from fused_slots.backends.ascend.staged_rows import RowPacker, StagedRows
from fused_slots.backends.base import Step
from fused_slots.backends.descriptor import descriptor_lines, shift_of
from fused_slots.backends.device import INDEX_DTYPES, DeviceBackend
from fused_slots.backends.entries import runtime_types
from fused_slots.backends.launch import Binding, Launch, Variant
from fused_slots.faults import INT32_MAX, ConfigurationError, Fault, FaultCode
from fused_slots.groups import GroupKind
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout
from fused_slots.plan import LaunchPlan

_MAPS_NOTHING = (("SHARDED", False), ("RING", False), ("REPLAY", False), ("NULLS", False))


class AscendOperations(DeviceBackend):
    """The operations as launches over one grid axis; a subclass brings memory and a launcher.

    Faults are counted, also in checked mode: which token or row was at fault is not recorded.
    """

    default_slot_dtype = torch.int32

    def __init__(self, layout: TableLayout, device: torch.device, checked: bool) -> None:
        super().__init__(layout, device, checked)
        groups, rows = layout.num_groups, layout.max_num_reqs
        self._entry_states = self.allocate((groups, 4, rows), torch.int32, 0)
        self._row_generations = self.allocate((rows,), torch.int32, 0)
        self._no_lines = self.allocate((3 * groups,), torch.int64, 0)
        self._no_positions = self.allocate((1,), torch.int64, 0)
        self._changing: dict[str, tuple[list[str], list[str]]] = {}
        self._packer = RowPacker(layout)
        self.num_cores = self.count_cores()

    def check_layout(self, layout: TableLayout) -> None:
        check_int32_slots(layout)
        super().check_layout(layout)

    def allocate_lines(self) -> None:
        from fused_slots.kernels.ascend import layout as field

        lines = self._numbers_of_groups()
        self._lines = self.allocate(tuple(lines.shape), torch.int32, 0)
        self._lines.copy_(lines)
        begin = field.FAULTS.value
        self._descriptor = self._lines[:, :begin]
        self._faults = self._lines[:, begin : begin + len(FaultCode) + 1].T

    def _numbers_of_groups(self) -> torch.Tensor:
        """The groups' lines as kernels read them, on the host; no faults."""
        from fused_slots.kernels.ascend import layout as field

        numbers, interleave = descriptor_lines(self.layout), self.layout.context_parallel.interleave
        lines = torch.zeros((len(numbers), field.LINE_WIDTH.value), dtype=torch.int32, device="cpu")
        lines[:, : numbers.shape[1]] = numbers
        lines[:, field.INTERLEAVE.value] = interleave
        lines[:, field.INTERLEAVE.value + 1] = shift_of(interleave)
        return lines

    @abstractmethod
    def count_cores(self) -> int:
        """Vector cores of the device."""

    def map_slots(self, step: Step) -> None:
        assert step.idx_mapping is not None
        out = self.slot_mappings if step.slots_out is None else step.slots_out
        num_reqs, num_tokens = step.idx_mapping.shape[0], step.num_tokens_padded
        planned = self._plan(
            are_long(num_reqs, num_tokens),
            capacity=out.shape[1],
            num_reqs=num_reqs,
            num_tokens=num_tokens,
        )
        replay = self._replays(step)
        variant = self._variant_of_map(
            step.idx_mapping.dtype, out.dtype, planned.runs, replay, flat=False
        )
        self._launch(variant, planned, **self._token_arguments(step, out))

    def map_tokens(self, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        planned = self._plan(False, capacity=out.shape[1], num_tokens=rows.shape[0])
        variant = self._variant_of_map(rows.dtype, out.dtype, False, False, flat=True)
        drafts = Step(rows, positions=positions, num_tokens_padded=len(rows))
        self._launch(variant, planned, **self._token_arguments(drafts, out))

    def restore(self, rows: HostRows) -> None:
        super().restore(rows)
        self._lines.copy_(self._numbers_of_groups())
        self._row_generations.copy_(torch.from_numpy(rows.generations))
        self._no_lines.zero_()
        self._no_positions.zero_()

    def forget_gathered(self) -> None:
        self._entry_states[:, 0].fill_(-2)
        for states, width in zip(self._entry_states, self.layout.widths, strict=True):
            states[2].fill_(width)

    def take_faults(self) -> list[Fault]:
        # A column that a ring lacks is its only one.
        for g, group in enumerate(self.layout.groups):
            if group.kind is GroupKind.RING:
                of_group = self._faults[:, g]
                of_group[FaultCode.EMPTY_RING] += of_group[FaultCode.COLUMN_OUT_OF_ROW]
                of_group[FaultCode.COLUMN_OUT_OF_ROW] = 0
        return super().take_faults()

    def launch_plan(self, num_reqs: int, num_tokens: int, max_query_len: int | None) -> LaunchPlan:
        capacity = self.layout.max_num_batched_tokens
        planned = self._plan(
            are_long(num_reqs, num_tokens),
            capacity=capacity,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
        )
        dtype = self.layout.slot_dtype
        variant = self._variant_of_map(torch.int32, dtype, planned.runs, False, flat=False)
        grid = (1, self.layout.num_groups * planned.programs)
        return LaunchPlan(grid, str(variant), planned.reason())

    def variants(self) -> Iterator[Variant]:
        """Every variant that a call can choose."""
        replays = (False, True) if self.layout.replay_window else (False,)
        for index_dtype in INDEX_DTYPES:
            for replay, runs in product(replays, (False, True)):
                for out_dtype in INDEX_DTYPES:
                    yield self._variant_of_map(index_dtype, out_dtype, runs, replay, flat=False)
                yield self._variant_of_step(index_dtype, runs, replay, whole=False)
            for out_dtype in INDEX_DTYPES:
                yield self._variant_of_map(index_dtype, out_dtype, False, False, flat=True)
            yield self._variant_of_step(index_dtype, False, False, whole=True)

    def step(self, step: Step) -> None:
        layout, slots, nothing = self.layout, self.slot_mappings, self._nothing
        index_dtype, num_reqs, num_entries = torch.int32, 0, 0
        maps, whole = step.query_start_loc is not None, step.tables_out is not None
        gathered, lines = self.input_arena, self._no_lines
        if step.idx_mapping is not None:
            index_dtype, num_reqs = step.idx_mapping.dtype, step.idx_mapping.shape[0]
            num_entries = step.num_reqs_padded
            if step.tables_out is not None:
                slots = nothing
                gathered, lines = self._out_lines(step.tables_out)
            else:
                num_entries = self.entries_to_gather(num_reqs, num_entries)
        planned = self._plan(
            maps and are_long(num_reqs, step.num_tokens_padded),
            capacity=layout.max_num_batched_tokens if maps else 0,
            num_reqs=num_reqs,
            num_tokens=step.num_tokens_padded,
            num_entries=num_entries,
            num_written_rows=0 if step.staged is None else step.staged.num_staged_rows,
        )
        if not planned.programs:
            return
        rows, computed = self._staged_rows(step.staged), step.num_computed_tokens
        replay = maps and self._replays(step)
        arguments = self._token_arguments(step, slots)
        self._launch(
            self._variant_of_step(index_dtype, planned.runs, replay, whole),
            planned,
            **arguments | {"capacity": layout.max_num_batched_tokens},
            gathered_ptr=gathered,
            gathered_lines_ptr=lines,
            num_computed_ptr=nothing if computed is None or self._sharded else computed,
            starts_ptr=rows.starts,
            generations_ptr=rows.generations,
            written_rows_ptr=rows.written_rows,
            num_entries=num_entries,
            plane=rows.plane,
            num_written_rows=rows.num_written_rows,
        )
        if step.staged is not None:
            self.uploads.mark_used()

    def _token_arguments(self, step: Step, slots: torch.Tensor) -> dict[str, Any]:
        """Arguments of both kernels that a call decides, by their names; what is None is not
        read."""

        def given(tensor: torch.Tensor | None) -> torch.Tensor:
            return self._nothing if tensor is None else tensor

        positions = self._no_positions if step.positions is None else step.positions
        index, num_reqs = given(step.idx_mapping), 0
        if step.idx_mapping is not None:
            num_reqs = index.shape[0]
            if num_reqs == 0:  # Its address may be null, and kernels read one entry all the same.
                index = self._nothing if index.dtype is torch.int32 else self._no_positions
        return {
            "slots_ptr": slots,
            "idx_mapping_ptr": index,
            "query_start_loc_ptr": given(step.query_start_loc),
            "positions_ptr": positions,
            "replay_start_ptr": given(step.replay_start),
            "replay_len_ptr": given(step.replay_len),
            "replay_window": self.layout.replay_window if step.replay_len is None else -1,
            "slots_stride": slots.stride(0),
            "capacity": slots.shape[-1],
            "num_reqs": num_reqs,
            "num_tokens_padded": step.num_tokens_padded,
            "num_positions": 0 if step.positions is None else positions.shape[0],
        }

    def _replays(self, step: Step) -> bool:
        if step.replay_start is None:
            return False
        return step.replay_len is not None or self.layout.replay_window > 0

    def _plan(self, runs: bool, **sizes: int) -> AscendPlan:
        return plan_launch(self.layout.num_groups, self.num_cores, runs, **sizes)

    def _staged_rows(self, staged: HostRows | None) -> StagedRows:
        """The rows that a launch reads and writes; those on the device if it writes none."""
        if staged is None:
            nothing = self._nothing
            return StagedRows(self._row_generations, self.num_columns, 0, nothing, 0)
        writes = staged.collect()
        size, fill = self._packer.size(writes), partial(self._packer.pack, writes)
        packet, _ = self.uploads.upload(size, fill)
        return self._packer.views(packet, writes)

    def _out_lines(self, out: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """One of the caller's tables, and on the device the way from it to each, its stride and
        width."""
        first = self.first_of(out)
        base = first.data_ptr()
        key = tuple(
            number
            for table in out
            for number in ((table.data_ptr() - base) // 4, table.stride(0), table.shape[1])
        )
        return first, self.kept_on_device(key)

    def first_of(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        """The table that the others are found from."""
        return min(out, key=lambda table: table.data_ptr())

    def _launch(self, variant: Variant, planned: AscendPlan, **values: Any) -> None:
        """Launch a variant; `values` are arguments by their names in the kernel's signature."""
        launch = self._bound(variant)
        values |= planned.numbers
        tensors, numbers = self._changing[variant.kernel]
        launch(planned.programs, [values[n] for n in tensors], [values[n] for n in numbers])

    def _variant_of_map(
        self,
        index_dtype: torch.dtype,
        slot_dtype: torch.dtype,
        runs: bool,
        replay: bool,
        flat: bool,
    ) -> Variant:
        constants = (("RUNS", runs), ("FLAT", flat), *self._choices(replay))
        return Variant("slots_on_ascend", index_dtype, slot_dtype, constants, num_warps=1)

    def _variant_of_step(
        self, index_dtype: torch.dtype, runs: bool, replay: bool, whole: bool
    ) -> Variant:
        slot_dtype, choices = self.layout.slot_dtype, self._choices(replay)
        if whole:  # A gather into other tables maps nothing.
            slot_dtype, choices = torch.int32, (("POW2", self._powers_of_two), *_MAPS_NOTHING)
        constants = (("RUNS", runs), *choices, ("WHOLE", whole))
        return Variant("step_on_ascend", index_dtype, slot_dtype, constants, num_warps=1)

    def _choices(self, replay: bool) -> tuple[tuple[str, bool], ...]:
        return (
            ("POW2", self._powers_of_two),
            ("SHARDED", self._sharded),
            ("RING", self._has_ring),
            ("REPLAY", replay),
            ("NULLS", self.layout.null_block_id is not None),
        )

    def _bind(self, variant: Variant) -> Launch:
        layout = self.layout
        tensors = {"lines_ptr": self._lines, "arena_ptr": self.arena}
        tensors["num_columns_ptr"] = self.num_columns
        if variant.kernel == "step_on_ascend":
            tensors["device_generations_ptr"] = self._row_generations
            tensors["state_ptr"] = self._entry_states
        numbers = {"num_groups": layout.num_groups, "max_num_reqs": layout.max_num_reqs}
        kernel = kernel_of(variant)
        types = runtime_types(kernel, index=variant.index_dtype, slot=variant.slot_dtype)
        changing = list(types)[: -len(tensors) - len(numbers)]
        assert list(types) == [*changing, *tensors, *numbers]
        self._changing[variant.kernel] = (
            [name for name in changing if types[name].startswith("*")],
            [name for name in changing if not types[name].startswith("*")],
        )
        changing_types, fixed = [types[name] for name in changing], tuple(tensors.values())
        sizes = tuple(numbers.values())
        return self.launcher.bind(
            Binding(kernel, variant, layout.num_groups, changing_types, fixed, sizes)
        )


def check_int32_slots(layout: TableLayout) -> None:
    """Refuse what int32 vectors cannot hold: slots, the elements of a table, the grid.

    Raises:
        ConfigurationError: names the group and the numbers.
    """
    if layout.num_groups > MAX_GROUPS:
        raise ConfigurationError(
            "groups",
            expected=f"at most {MAX_GROUPS}, so that a launch has no more than {MAX_GRID} programs",
            actual=str(layout.num_groups),
        )
    for g, group in enumerate(layout.groups):
        elements = layout.max_num_reqs * layout.widths[g]
        if elements > INT32_MAX:
            raise ConfigurationError(
                f"max_num_reqs x row width of {layout.describe(g)}",
                expected=f"at most {INT32_MAX} columns: kernels on Ascend compute them in int32",
                actual=f"{layout.max_num_reqs} x {layout.widths[g]} = {elements}",
            )
        if layout.slot_dtype is not torch.int64 or not group.maps_slots:
            continue
        pool = layout.num_blocks[g]
        if pool is None or pool * group.block_size > INT32_MAX + 1:
            raise ConfigurationError(
                f"slot_dtype=torch.int64 with num_blocks of {layout.describe(g)}",
                expected=f"num_blocks x block_size of at most {INT32_MAX + 1}: kernels on Ascend "
                "compute slots in int32, whatever the output's dtype",
                actual="an unknown pool"
                if pool is None
                else f"{pool} x {group.block_size} = {pool * group.block_size}",
                hint="Use slot_dtype=torch.int32, whose ids are checked as they are appended, or "
                "state num_blocks",
            )
