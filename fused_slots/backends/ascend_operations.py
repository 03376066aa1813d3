"""The manager's operations as launches of the Ascend kernels, wherever these run.

`slots_on_ascend` maps slots and drafts, and graphs may capture it; `step_on_ascend` does
everything that writes or gathers tables, alone or together, in one launch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from fused_slots import plan_ascend
from fused_slots.backends.ascend_packet import AscendPacker, StagedPlanes
from fused_slots.backends.base import Step
from fused_slots.backends.descriptor import shift_of
from fused_slots.backends.device import INDEX_DTYPES, DeviceBackend
from fused_slots.backends.launch import FixedArguments, Launch, Variant, triton_type
from fused_slots.faults import INT32_MAX, ConfigurationError
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout
from fused_slots.plan import LaunchPlan
from fused_slots.plan_ascend import AscendPlan, Tiles, choose_tiles, plan_launch

_MAPS_NOTHING = (("SHARDED", False), ("RING", False), ("REPLAY", False))


class AscendOperations(DeviceBackend):
    """The operations as launches over one grid axis; a subclass brings memory and a launcher.

    Faults are counted, also in checked mode: which token or row was at fault is not recorded.
    """

    default_slot_dtype = torch.int32
    fault_dtype = torch.int32  # other atomics take a lock in program order

    def __init__(self, layout: TableLayout, device: torch.device, checked: bool) -> None:
        check_int32_slots(layout)
        super().__init__(layout, device, checked)
        groups, rows = layout.num_groups, layout.max_num_reqs
        self._slot_states = self.allocate((4, groups, rows), torch.int32, 0)
        self._row_generations = self.allocate((rows,), torch.int32, 0)
        self._no_lines = self.allocate((3 * groups,), torch.int64, 0)
        self._long_map, self._long_step = plan_ascend.LONG_MAP, plan_ascend.LONG_STEP
        if self._sharded:
            self._long_map, self._long_step = map(
                plan_ascend.without_runs, (self._long_map, self._long_step)
            )
        self._packer = AscendPacker(layout)
        self.num_cores = self.count_cores()

    @abstractmethod
    def count_cores(self) -> int:
        """Vector cores of the device."""

    def map_slots(self, step: Step) -> None:
        idx_mapping, query_start_loc, positions = (
            step.idx_mapping,
            step.query_start_loc,
            step.positions,
        )
        assert idx_mapping is not None
        assert query_start_loc is not None
        assert positions is not None
        out = self.slot_mappings if step.slots_out is None else step.slots_out
        num_tokens_padded, replay_start = step.num_tokens_padded, step.replay_start
        num_reqs = idx_mapping.shape[0]
        planned = self._plan(
            choose_tiles(num_reqs, num_tokens_padded, self._long_map),
            capacity=out.shape[1],
            num_reqs=num_reqs,
            num_tokens=num_tokens_padded,
        )
        replay = replay_start is not None and self.layout.replay_window > 0
        variant = self._map_variant(idx_mapping.dtype, out.dtype, planned.tiles, replay, flat=False)
        starts = self._nothing if replay_start is None else replay_start
        tensors = (out, idx_mapping, query_start_loc, positions, self._words(positions), starts)
        self._launch_map(variant, planned, tensors, num_reqs)

    def map_tokens(self, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        num_tokens = rows.shape[0]
        tiles = plan_ascend.SHORT
        planned = self._plan(tiles, capacity=out.shape[1], num_tokens=num_tokens)
        variant = self._map_variant(rows.dtype, out.dtype, tiles, False, flat=True)
        nothing = self._nothing
        tensors = (out, rows, nothing, positions, self._words(positions), nothing)
        self._launch_map(variant, planned, tensors, 0)

    def forget_gathered(self) -> None:
        self._slot_states[0].fill_(-2)
        for filled, width in zip(self._slot_states[2], self.layout.widths, strict=True):
            filled.fill_(width)

    def launch_plan(self, num_reqs: int, num_tokens: int, max_query_len: int | None) -> LaunchPlan:
        capacity = self.layout.max_num_batched_tokens
        tiles = choose_tiles(num_reqs, num_tokens, self._long_map)
        planned = self._plan(tiles, capacity=capacity, num_tokens=num_tokens)
        dtype = self.layout.slot_dtype
        variant = self._map_variant(torch.int32, dtype, planned.tiles, False, flat=False)
        grid = (1, self.layout.num_groups * planned.programs)
        return LaunchPlan(grid, str(variant), planned.reason())

    def variants(self) -> Iterator[Variant]:
        """Every variant that a call can choose."""
        replays = (False, True) if self.layout.replay_window else (False,)
        short = plan_ascend.SHORT
        for index_dtype in INDEX_DTYPES:
            for replay in replays:
                for tiles in (short, self._long_map):
                    for out_dtype in INDEX_DTYPES:
                        yield self._map_variant(index_dtype, out_dtype, tiles, replay, flat=False)
                for tiles in (short, self._long_step):
                    yield self._step_choice(index_dtype, tiles, replay, whole=False)
            for out_dtype in INDEX_DTYPES:
                yield self._map_variant(index_dtype, out_dtype, short, False, flat=True)
            yield self._step_choice(index_dtype, short, False, whole=True)

    def step(self, step: Step) -> None:
        (
            idx_mapping,
            query_start_loc,
            positions,
            num_reqs_padded,
            num_tokens_padded,
            num_computed_tokens,
            replay_start,
            _,
            staged,
            out,
            _,
        ) = step
        layout, slots, nothing = self.layout, self.slot_mappings, self._nothing
        num_reqs = 0 if idx_mapping is None else idx_mapping.shape[0]
        maps, whole = query_start_loc is not None, out is not None
        num_slots, gathered, lines = 0, self.input_arena, self._no_lines
        if out is not None:
            num_slots, slots = num_reqs_padded, nothing
            gathered, lines = self._out_lines(out)
        elif idx_mapping is not None:
            num_slots = self.entries_to_gather(num_reqs, num_reqs_padded)
        written = 0 if staged is None else staged.num_staged_rows
        planned = self._plan(
            choose_tiles(num_reqs, num_tokens_padded, self._long_step)
            if maps
            else plan_ascend.SHORT,
            capacity=layout.max_num_batched_tokens if maps else 0,
            num_reqs=num_reqs,
            num_tokens=num_tokens_padded,
            num_slots=num_slots,
            num_written_rows=written,
        )
        if not planned.programs:
            return
        planes = self._staged_planes(staged)
        replay = maps and replay_start is not None and layout.replay_window > 0
        index_dtype = torch.int32 if idx_mapping is None else idx_mapping.dtype
        if num_computed_tokens is None or self._sharded:
            num_computed_tokens = nothing
        places = self._no_lines if positions is None else positions
        tensors = (
            slots,
            gathered,
            lines,
            nothing if idx_mapping is None else idx_mapping,
            nothing if query_start_loc is None else query_start_loc,
            places,
            self._words(places),
            nothing if replay_start is None else replay_start,
            num_computed_tokens,
            planes.filled,
            planes.starts,
            planes.bases,
            planes.generations,
            planes.rows,
            planes.ids,
        )
        numbers = (
            slots.stride(0),
            layout.max_num_batched_tokens,
            num_reqs,
            0 if positions is None else positions.shape[0],
            num_slots,
            written,
            planned.num_tiles,
            planned.num_pad,
            planned.num_gather,
            planned.num_write,
            planned.search_steps,
        )
        variant = self._step_choice(index_dtype, planned.tiles, replay, whole)
        self._bound(variant)(planned.programs, tensors, numbers)
        if staged is not None:
            self.uploaded_packet_used()

    def _plan(self, tiles: Tiles, **sizes: int) -> AscendPlan:
        return plan_launch(self.layout.num_groups, self.num_cores, tiles, **sizes)

    def _staged_planes(self, staged: HostRows | None) -> StagedPlanes:
        """Row lengths and staged ids, from the packet, or those on the device if it is None."""
        if staged is not None:
            writes = staged.collect()
            size, fill = self._packer.size(writes), partial(self._packer.pack, writes)
            packet, _ = self.upload(size, fill)
            return self._packer.planes(packet, writes)
        columns, nothing = self.num_columns, self._nothing
        return StagedPlanes(self._row_generations, columns, columns, columns, nothing, nothing)

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

    def _words(self, positions: torch.Tensor) -> torch.Tensor:
        """The same memory as int32, which only divisions by other sizes read."""
        if self._powers_of_two:
            return self._nothing
        # A tensor of one or no element may have any stride, which view() refuses.
        return positions.as_strided(positions.shape, (1,)).view(torch.int32)

    def _launch_map(
        self,
        variant: Variant,
        planned: AscendPlan,
        tensors: tuple[torch.Tensor, ...],
        num_reqs: int,
    ) -> None:
        out, positions = tensors[0], tensors[3]
        numbers = [out.stride(0), out.shape[1], num_reqs, positions.shape[0]]
        numbers += [planned.num_tiles, planned.num_pad, planned.search_steps]
        self._bound(variant)(planned.programs, tensors, numbers)

    def _map_variant(
        self,
        index_dtype: torch.dtype,
        slot_dtype: torch.dtype,
        tiles: Tiles,
        replay: bool,
        flat: bool,
    ) -> Variant:
        sizes = (*_sizes(tiles), ("FLAT", flat))
        constants = (*sizes, *self._choices(replay))
        return Variant("slots_on_ascend", index_dtype, slot_dtype, constants, num_warps=1)

    def _step_choice(
        self, index_dtype: torch.dtype, tiles: Tiles, replay: bool, whole: bool
    ) -> Variant:
        sizes = (
            *_sizes(tiles),
            ("SLOTS", plan_ascend.SLOTS),
            ("COLUMNS", plan_ascend.COLUMNS),
        )
        slot_dtype, choices = self.layout.slot_dtype, self._choices(replay)
        if whole:  # A gather into other tables maps nothing.
            slot_dtype, choices = torch.int32, (("POW2", self._powers_of_two), *_MAPS_NOTHING)
        constants = (*sizes, *choices, ("WHOLE", whole))
        return Variant("step_on_ascend", index_dtype, slot_dtype, constants, num_warps=1)

    def _choices(self, replay: bool) -> tuple[tuple[str, bool], ...]:
        return (
            ("POW2", self._powers_of_two),
            ("SHARDED", self._sharded),
            ("RING", self._has_ring),
            ("REPLAY", replay),
        )

    def _bind(self, variant: Variant) -> Launch:
        from fused_slots.kernels import slot_mapping_ascend, step_ascend

        layout = self.layout
        interleave = layout.context_parallel.interleave
        numbers = (
            layout.num_groups,
            layout.max_num_reqs,
            interleave,
            shift_of(interleave),
            layout.replay_window,
        )
        index, slot = triton_type(variant.index_dtype), triton_type(variant.slot_dtype)
        tables: tuple[torch.Tensor, ...] = (self._descriptor, self.arena, self.num_columns)
        if variant.kernel == "step_on_ascend":
            kernel = step_ascend.step_on_ascend
            types = [slot, "*i32", "*i64", index, "*i32", "*i64", *["*i32"] * 9]
            types += ["i64", *["i32"] * 10]
            tables += (self._row_generations, self._slot_states)
        else:
            kernel = slot_mapping_ascend.slots_on_ascend
            types = [slot, index, "*i32", "*i64", "*i32", "*i32", "i64", *["i32"] * 6]
        fixed = FixedArguments((*tables, self._faults), numbers)
        return self.launcher.bind(kernel, variant, layout.num_groups, types, fixed)


def _sizes(tiles: Tiles) -> tuple[tuple[str, int], ...]:
    return (("SPAN", tiles.span), ("TILE", tiles.tile), ("PAD_TILE", plan_ascend.PAD_TILE))


def check_int32_slots(layout: TableLayout) -> None:
    """Refuse what int32 vectors cannot hold: slots, the elements of a table, the grid.

    Raises:
        ConfigurationError: names the group and the numbers.
    """
    if layout.num_groups > plan_ascend.MAX_GROUPS:
        raise ConfigurationError(
            "groups",
            expected=f"at most {plan_ascend.MAX_GROUPS}, so that a launch has no more than "
            f"{plan_ascend.MAX_GRID} programs",
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
