"""The operations on a GPU (or in the interpreter): launches of the kernels in kernels/gpu.

Slots and drafts are launches of `slots_kernel`, everything that writes or gathers tables, alone or
together, is one of `step_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from fused_slots import env, plan
from fused_slots.backends.base import Step
from fused_slots.backends.descriptor import shift_of
from fused_slots.backends.device import INDEX_DTYPES, DeviceBackend
from fused_slots.backends.entries import runtime_types
from fused_slots.backends.launch import Binding, Launch, Variant
from fused_slots.faults import FAULT_DETAILS, Fault, FaultCode
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout
from fused_slots.plan import LaunchPlan, TokenPlan

KEPT_PLANS = 1024
"""Pairs of sizes whose token plan is kept."""

_NO_TOKENS = TokenPlan(False, 0, 0, 1, 0)


class GpuBackend(DeviceBackend):
    """Block tables that GPU kernels work on; a subclass brings memory and a launcher."""

    plans = ("auto", "by_request")

    def __init__(self, layout: TableLayout, device: torch.device, checked: bool) -> None:
        super().__init__(layout, device, checked)
        num_groups, num_rows = layout.num_groups, layout.max_num_reqs
        self._generations = self.allocate((num_groups, num_rows), torch.int32, 0)
        widest = max(layout.widths, default=0)
        self._helpers = plan.gather_helpers(widest, num_rows, num_groups)
        self._state = self.allocate((self._helpers, num_groups, num_rows, 2), torch.int64, 0)
        self._full_extents = self.allocate((num_groups, 1), torch.int64, 0)
        self._fill_extents()
        # Unchecked kernels do not touch them.
        self._details = self._faults
        if checked:
            from fused_slots.kernels.layout import DETAIL_WIDTH

            size = 1 + FAULT_DETAILS * DETAIL_WIDTH.value
            self._details = self.allocate((size,), torch.int64, 0)
        self._by_request = env.PLAN.read() == "by_request"
        self._map_tile = plan.REQUEST_TILE if self._by_request else plan.TILE
        # The variants that the assembler would spill registers in otherwise.
        heavy = checked or not self._powers_of_two
        self._max_registers = plan.HEAVY_REGISTERS if heavy else None
        # By what a call decides, so that a step hashes no variant.
        self._chosen: dict[tuple[Any, ...], Launch] = {}
        # Making a plan anew costs as much as all checks together.
        self._plan_tokens = lru_cache(KEPT_PLANS)(plan.plan_tokens)
        slots = self.slot_mappings
        self._slot_stride, self._capacity = slots.stride(0), slots.shape[1]
        interleave = layout.context_parallel.interleave
        self._fixed: dict[str, torch.Tensor | int] = {
            "descriptor_ptr": self._descriptor,
            "arena_ptr": self.arena,
            "num_columns_ptr": self.num_columns,
            "generations_ptr": self._generations,
            "state_ptr": self._state,
            "faults_ptr": self._faults,
            "details_ptr": self._details,
            "num_groups": num_groups,
            "max_num_reqs": num_rows,
            "interleave": interleave,
            "interleave_shift": shift_of(interleave),
        }
        """Arguments of the kernels that are the same in every launch."""

    def map_slots(self, step: Step) -> None:
        idx_mapping, query_start_loc = step.idx_mapping, step.query_start_loc
        positions = step.positions
        assert idx_mapping is not None
        assert query_start_loc is not None
        assert positions is not None
        out = self.slot_mappings if step.slots_out is None else step.slots_out
        num_reqs = idx_mapping.shape[0]
        capacity = out.shape[1]
        tokens = self._plan_tokens(
            num_reqs, step.num_tokens_padded, capacity, self._map_tile, self._by_request
        )
        replay, starts, lens, window = self._replay(step)
        launch = self._launch_of("slots_kernel", idx_mapping.dtype, out.dtype, replay, False)
        programs = tokens.num_tiles * (num_reqs if tokens.by_request else 1) + tokens.num_pad
        numbers = [out.stride(0), capacity, num_reqs, positions.shape[0]]
        numbers += [step.num_tokens_padded, window, tokens.num_tiles, tokens.num_pad]
        numbers += [tokens.query_len_inverse, tokens.search_steps]
        tensors = (out, idx_mapping, query_start_loc, positions, starts, lens)
        launch(programs, tensors, numbers)

    def map_tokens(self, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        num_tokens, capacity = rows.shape[0], out.shape[1]
        tokens = self._plan_tokens(0, num_tokens, capacity, plan.TILE)
        launch = self._launch_of("slots_kernel", rows.dtype, out.dtype, False, True)
        numbers = [out.stride(0), capacity, 0, num_tokens, num_tokens, 0]
        numbers += [tokens.num_tiles, tokens.num_pad, 1, 0]
        nothing = self._nothing
        tensors = (out, rows, nothing, positions, nothing, nothing)
        launch(tokens.num_tiles + tokens.num_pad, tensors, numbers)

    def restore(self, rows: HostRows) -> None:
        self._fill_extents()
        super().restore(rows)
        self._generations.copy_(torch.from_numpy(rows.generations))
        self._details.zero_()

    def _fill_extents(self) -> None:
        widths = torch.tensor(self.layout.widths, dtype=torch.int64, device="cpu")
        self._full_extents[:, 0].copy_(widths << 32)

    def forget_gathered(self) -> None:
        self._state[..., 0].fill_(-2)
        self._state[..., 1].copy_(self._full_extents.expand(-1, self.layout.max_num_reqs))

    def take_fault_details(self) -> list[Fault]:
        if not self.checked:
            return []
        numbers = self._details.to("cpu", copy=True).numpy()
        self._details[:1].zero_()
        recorded = min(int(numbers[0]), FAULT_DETAILS)
        lines = numbers[1:].reshape(FAULT_DETAILS, -1)[:recorded]
        return [
            Fault(FaultCode(code), g, 1, row, token, position)
            for code, g, row, token, position in lines.tolist()
        ]

    def launch_plan(self, num_reqs: int, num_tokens: int, max_query_len: int | None) -> LaunchPlan:
        capacity = self.layout.max_num_batched_tokens
        tokens = self._plan_tokens(num_reqs, num_tokens, capacity, self._map_tile, self._by_request)
        programs = tokens.num_tiles * (num_reqs if tokens.by_request else 1) + tokens.num_pad
        slot_dtype = self.layout.slot_dtype
        variant = self._variant("slots_kernel", torch.int32, slot_dtype, False, False)
        reason = plan.reason(tokens, self._map_tile, max_query_len)
        return LaunchPlan((self.layout.num_groups, programs), str(variant), reason)

    def variants(self) -> Iterator[Variant]:
        """Every variant that a call can choose."""
        replays = (False, True) if self.warms_replay else (False,)
        slot_dtype = self.layout.slot_dtype
        for index_dtype in INDEX_DTYPES:
            for replay in replays:
                for out_dtype in INDEX_DTYPES:
                    yield self._variant("slots_kernel", index_dtype, out_dtype, replay, False)
                yield self._variant("step_kernel", index_dtype, slot_dtype, replay, False)
            for out_dtype in INDEX_DTYPES:
                yield self._variant("slots_kernel", index_dtype, out_dtype, False, True)
            yield self._variant("step_kernel", index_dtype, slot_dtype, False, True)

    def step(self, step: Step) -> None:
        idx_mapping, query_start_loc, positions, num_reqs_padded, num_tokens = step[:5]
        computed, staged, out = step.num_computed_tokens, step.staged, step.tables_out
        layout, nothing, capacity = self.layout, self._nothing, self._capacity
        num_reqs = 0 if idx_mapping is None else idx_mapping.numel()
        gathered, num_entries = self.input_arena, 0
        if out is not None:
            gathered, num_entries = self._out_table(out), num_reqs_padded
        elif idx_mapping is not None:
            num_entries = self.entries_to_gather(num_reqs, num_reqs_padded)
        num_gather = plan.ceil_div(num_entries, plan.ENTRIES) * self._helpers
        tokens = _NO_TOKENS
        if query_start_loc is not None:
            tokens = self._plan_tokens(num_reqs, num_tokens, capacity, plan.STEP_TILE)
        packet, written, write_chunks, num_write = nothing, 0, 0, 0
        if staged is not None:
            packet, longest = self.uploads.upload(staged.packet_size, staged.pack)
            written = staged.num_staged_rows
            write_chunks = plan.write_chunks(longest, written)
            num_write = plan.ceil_div(written, plan.RECORDS) * write_chunks
        replay, starts, lens, window = self._replay(step)
        null_columns = computed is not None and not self._sharded
        index_dtype = torch.int32 if idx_mapping is None else idx_mapping.dtype
        whole = out is not None
        launch = self._launch_of("step_kernel", index_dtype, layout.slot_dtype, replay, whole)
        tensors = (
            self.slot_mappings,
            gathered,
            nothing if idx_mapping is None else idx_mapping,
            nothing if query_start_loc is None else query_start_loc,
            self._faults if positions is None else positions,
            starts,
            lens,
            nothing if computed is None else computed,
            packet,
        )
        numbers = (
            self._slot_stride,
            capacity,
            num_reqs,
            0 if positions is None else positions.numel(),
            num_tokens,
            window,
            num_entries,
            self._helpers,
            int(null_columns),
            written,
            write_chunks,
            num_gather,
            tokens.num_tiles,
            tokens.num_pad,
            tokens.query_len_inverse,
            tokens.search_steps,
        )
        programs = num_gather + tokens.num_tiles + tokens.num_pad + num_write
        if programs:
            launch(programs, tensors, numbers)
        if staged is not None:
            self.uploads.mark_used()

    def _replay(self, step: Step) -> tuple[bool, torch.Tensor, torch.Tensor, int]:
        """Whether tokens may be replayed, starts and lengths by entry, and the length of all."""
        starts, lens = step.replay_start, step.replay_len
        if starts is None:
            return False, self._nothing, self._nothing, 0
        if lens is not None:
            return True, starts, lens, -1
        window = self.layout.replay_window
        return window > 0, starts, self._nothing, window

    def _out_table(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        """Address, stride and width of each caller's table, on the device."""
        return self.kept_on_device(
            tuple(
                number
                for table in out
                for number in (table.data_ptr(), table.stride(0), table.shape[1])
            )
        )

    def _launch_of(self, *choice: Any) -> Launch:
        """What launches the variant that `_variant` makes of this choice."""
        launch = self._chosen.get(choice)
        if launch is None:
            launch = self._chosen[choice] = self._bound(self._variant(*choice))
        return launch

    def _variant(
        self,
        kernel: str,
        index_dtype: torch.dtype,
        slot_dtype: torch.dtype,
        replay: bool,
        flat_or_whole: bool,
    ) -> Variant:
        """A kernel with the constants that it declares: choices, and the sizes of plan.py.

        Args:
            kernel: the entry's name.
            index_dtype: of idx_mapping, or of drafts' rows.
            slot_dtype: of the slots.
            replay: tokens may be replayed.
            flat_or_whole: FLAT of `slots_kernel`, WHOLE of `step_kernel`.
        """
        is_step = kernel == "step_kernel"
        by_request = self._by_request and not flat_or_whole
        values = {
            "TILE": plan.STEP_TILE if is_step else plan.REQUEST_TILE if by_request else plan.TILE,
            "FLAT": flat_or_whole,
            "WHOLE": flat_or_whole,
            "BY_REQUEST": by_request,
            "POW2": self._powers_of_two,
            "SHARDED": self._sharded,
            "RING": self._has_ring,
            "NULLS": self.layout.null_block_id is not None,
            "REPLAY": replay,
            "CHECKED": self.checked,
        }
        entry = _kernel(kernel)
        declared = entry.arg_names[len(runtime_types(entry)) :]
        constants = tuple(
            (name, values[name] if name in values else getattr(plan, name)) for name in declared
        )
        warps = plan.STEP_WARPS if is_step else plan.MAP_WARPS
        return Variant(kernel, index_dtype, slot_dtype, constants, warps, self._max_registers)

    def _bind(self, variant: Variant) -> Launch:
        kernel = _kernel(variant.kernel)
        types = runtime_types(
            kernel,
            index=variant.index_dtype,
            slot=variant.slot_dtype,
            table=torch.int64 if dict(variant.constants).get("WHOLE") else torch.int32,
        )
        changing = [type_ for name, type_ in types.items() if name not in self._fixed]
        values = [self._fixed[name] for name in types if name in self._fixed]
        tensors = tuple(value for value in values if isinstance(value, torch.Tensor))
        numbers = tuple(value for value in values if isinstance(value, int))
        num_groups = self.layout.num_groups
        return self.launcher.bind(Binding(kernel, variant, num_groups, changing, tensors, numbers))


def _kernel(name: str) -> Any:
    """An entry by its name; its file is imported when the first variant is made."""
    from fused_slots.kernels.gpu import slots, step

    return step.step_kernel if name == "step_kernel" else getattr(slots, name)
