"""vllm-ascend's v1 block tables: its constructor and attributes over ours.

Its `NPUInputBatch` builds them on every Ascend device but the 310P, whatever the release; what
differs from release to release is in `AscendRules`. Rows are as wide as they are said to be, slots
are int32, and their buffers are longer than a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from fused_slots.block_tables import AscendBlockTables
from fused_slots.faults import ConfigurationError
from fused_slots.groups import PAD_SLOT_ID, SlotMappingMode
from fused_slots.layout import per_group
from fused_slots.vllm.v1 import MultiGroupBlockTable, blocks_of_a_request
from fused_slots.vllm.v1_storage import Indices, Storage, parallel_group
from fused_slots.vllm.v1_table import BlockTable

SLOT_ALIGNMENT = 128
"""int32 slots; every group's slots begin on a 512-byte boundary, as in a buffer of their own."""


@dataclass(frozen=True)
class AscendRules:
    """What differs between vllm-ascend's release lines.

    Attributes:
        draft_slots: slots for num_speculative_tokens - 1 drafts of each request follow a step's.
        slots_per_request: so many more slots for each request.
        compressed_rows: a group of several layer types has its first layer's compress_ratio times
            fewer blocks.
        snapshot_rows: the runner does not wait for a commit before it writes into the rows.
        rings: "" = circular groups are not told from others; "mapped" = always mapped as rings;
            "together" = only in the call for all groups, and only where another group has slots.
    """

    draft_slots: bool = True
    slots_per_request: int = 0
    compressed_rows: bool = False
    snapshot_rows: bool = False
    rings: str = ""


class FusedAscendTable(BlockTable):
    """One group's table as vllm-ascend's v1 runner sees it."""

    is_mamba_group: bool
    is_circular: bool
    kernel_sizes: list[int] | None

    def describe_group(self, kind: str, kernel_sizes: list[int] | None, pads_alone: bool) -> None:
        """Set what vllm-ascend reads of its own tables.

        Args:
            kind: "paged", "state" or "ring".
            kernel_sizes: as the runner chose them.
            pads_alone: calls for this group alone give PAD.
        """
        self.is_mamba_group = kind == "state"
        self.is_circular = self.is_circular_group = kind == "ring"
        self.kernel_sizes = kernel_sizes
        self.physical_block_size = self.kv_cache_block_size
        self.logical_block_size = self.block_size
        self.blocks_per_phys_block = self.blocks_per_kv_block
        # Its own counts allocation blocks here, and columns in the table's width.
        self.max_num_blocks_per_req //= self.blocks_per_kv_block
        self._pads_alone = pads_alone

    def narrow_slots(self, width: int) -> None:
        """Show the first `width` slots of the buffer, which is longer to be aligned."""
        self.slot_mapping = self.slot_mapping.first(width)

    def compute_slot_mapping(
        self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Slots of this group's tokens alone; PAD for a ring where vllm-ascend has PAD."""
        if self._pads_alone:
            self.slot_mapping.gpu.fill_(PAD_SLOT_ID)
        else:
            tokens = FusedAscendMultiGroupBlockTable.as_step(query_start_loc, positions)
            super().compute_slot_mapping(num_reqs, *tokens)

    def compute_slot_mapping_draft(self, req_indices: Indices, positions: Indices) -> None:
        """Slots of a flat list of (row, position) pairs; PAD for a ring, as above."""
        if self._pads_alone:
            self.slot_mapping.gpu.fill_(PAD_SLOT_ID)
        else:
            super().compute_slot_mapping_draft(req_indices, positions)


class FusedAscendMultiGroupBlockTable(MultiGroupBlockTable):
    """All groups' tables, with the constructor of vllm-ascend 0.23 to 0.30.

    Args:
        max_num_reqs, max_num_batched_tokens, pin_memory, device, block_sizes,
        cp_kv_cache_interleave_size: as `MultiGroupBlockTable`.
        max_model_len: tokens of one request; used without max_num_blocks.
        num_speculative_tokens: drafts of one request in a step.
        max_num_blocks: allocation blocks of one row, taken as given.
        kernel_sizes: per group a list of candidates, the first of which to divide the block is
            taken, or one size; 0 = no split. One entry may stand for all groups.
        kv_cache_groups: a `KVCacheGroupSpec` of vLLM's each; they tell state and rings from pages.

    Raises:
        ConfigurationError: what cannot be mapped exactly: prefill context parallelism, decode
            context parallelism with drafts (its tables hold each request several times). Under
            the plugin's mode `auto` vllm-ascend's own class is built instead.
    """

    rules = AscendRules(rings="together")

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device,
        block_sizes: Sequence[int],
        num_speculative_tokens: int = 0,
        max_num_blocks: Sequence[int] | None = None,
        kernel_sizes: Sequence[int | Sequence[int]] | None = None,
        cp_kv_cache_interleave_size: int = 1,
        kv_cache_groups: Sequence[Any] | None = None,
    ) -> None:
        ranks, rank = parallel_group("dcp")
        count = len(block_sizes)
        specs = [getattr(group, "kv_cache_spec", None) for group in kv_cache_groups or ()]
        specs = [*specs, *[None] * count][:count]
        kinds = [self._kind(spec) for spec in specs]
        refuse_unserved(num_speculative_tokens, kinds)
        if max_num_blocks is None:
            max_num_blocks = blocks_of_a_request(max_model_len, block_sizes, ranks)
        blocks = per_group("max_num_blocks", max_num_blocks, count)
        candidates = _candidates(kernel_sizes, block_sizes, kinds)
        width = self._slot_width(max_num_batched_tokens, max_num_reqs, num_speculative_tokens)
        # A ring that is the only group with slots is never mapped.
        alone = self.rules.rings == "together" and len(kinds) - kinds.count("state") == 1
        mapped = {"paged"} if alone else {"paged", "ring"}
        manager = AscendBlockTables(
            block_sizes=block_sizes,
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=-(-width // SLOT_ALIGNMENT) * SLOT_ALIGNMENT,
            max_num_blocks_per_group=[
                self._row_blocks(*group, ranks) for group in zip(blocks, kinds, specs, strict=True)
            ],
            device=device,
            cp_size=ranks,
            cp_rank=rank,
            cp_interleave=cp_kv_cache_interleave_size,
            kernel_block_sizes=list(map(_first_divisor, range(count), block_sizes, candidates)),
            slot_mapping_enabled=[kind in mapped for kind in kinds],
            circular=[kind == "ring" and not alone for kind in kinds],
            slot_dtype=torch.int32,
        )
        none, paged = SlotMappingMode.NONE, SlotMappingMode.TOKEN_TO_KV_SLOT
        storage = Storage(manager, pin_memory, self.rules.snapshot_rows)
        self._build(storage, [none if kind == "state" else paged for kind in kinds], pin_memory)
        self._rings = [g for g, kind in enumerate(kinds) if kind == "ring"]
        for table, kind, sizes in zip(self.block_tables, kinds, candidates, strict=True):
            assert isinstance(table, FusedAscendTable)
            table.describe_group(kind, sizes, kind == "ring" and self.rules.rings == "together")
            table.max_num_batched_tokens = max_num_batched_tokens
            table.narrow_slots(width)

    table_class = FusedAscendTable
    check_engine = staticmethod(lambda: refuse_310p())

    @staticmethod
    def as_step(
        query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step's tokens in our types: speculators pass positions of either width."""
        return query_start_loc.to(torch.int32), positions.to(torch.int64)

    def compute_slot_mapping_draft(
        self,
        req_indices: Any,
        positions: Any,
        positions_compressed_list: Sequence[Indices] | None = None,
        req_indices_compressed_list: Sequence[Indices] | None = None,
    ) -> None:
        """As `MultiGroupBlockTable`; PAD for rings where vllm-ascend has PAD."""
        super().compute_slot_mapping_draft(
            req_indices, positions, positions_compressed_list, req_indices_compressed_list
        )
        if self.rules.rings == "together":
            for g in self._rings:
                self[g].slot_mapping.gpu.fill_(PAD_SLOT_ID)

    def _kind(self, spec: Any) -> str:
        """What a group's table holds: "paged", "state" or "ring"."""
        layers = list(_layer_specs(spec))
        if self.rules.rings and layers and all(map(_is_circular, layers)):
            return "ring"
        # Up to 0.26 a group of several layer types is none of Mamba's.
        if self.rules.compressed_rows and hasattr(spec, "kv_cache_specs"):
            return "paged"
        return "state" if layers and all(_is_a(layer, "MambaSpec") for layer in layers) else "paged"

    def _row_blocks(self, blocks: int, kind: str, spec: Any, ranks: int) -> int:
        """Allocation blocks of one row."""
        if kind == "ring":
            return 1
        if not self.rules.compressed_rows:
            return blocks
        # Each rank's state is the whole state.
        return _compressed(blocks, spec) * (ranks if kind == "state" else 1)

    def _slot_width(self, num_tokens: int, num_reqs: int, num_drafts: int) -> int:
        drafts = max(num_drafts - 1, 0) if self.rules.draft_slots else 0
        return num_tokens + (drafts + self.rules.slots_per_request) * num_reqs


class FusedAscendTables027(FusedAscendMultiGroupBlockTable):
    """For vllm-ascend 0.27: no rings."""

    rules = AscendRules()


class FusedAscendTables028(FusedAscendMultiGroupBlockTable):
    """For vllm-ascend 0.28: rings are mapped by every call."""

    rules = AscendRules(rings="mapped")


class FusedAscendTables026(FusedAscendMultiGroupBlockTable):
    """For vllm-ascend 0.26: compressed rows."""

    rules = AscendRules(compressed_rows=True)


class FusedAscendTables024(FusedAscendMultiGroupBlockTable):
    """For vllm-ascend 0.24 and 0.25: two more slots a request in the place of drafts' slots."""

    rules = AscendRules(draft_slots=False, slots_per_request=2, compressed_rows=True)


class FusedAscendTables023(FusedAscendMultiGroupBlockTable):
    """For vllm-ascend 0.23: both, and a runner that does not wait for commits."""

    rules = AscendRules(slots_per_request=2, compressed_rows=True, snapshot_rows=True)


def refuse_310p() -> None:
    """Stand back on a device for which vllm-ascend has tables derived from those replaced.

    Raises:
        ConfigurationError: the vllm-ascend that is installed was built for it.
    """
    if is_310p():
        raise ConfigurationError(
            "vllm_ascend._build_info",
            expected="an Ascend device other than the 310P",
            actual="310P",
            hint="vllm-ascend has tables of its own for it, which compute slots on the host",
        )


def refuse_unserved(num_speculative_tokens: int, kinds: Sequence[str]) -> None:
    """Stand back where our slots, or the rows they are read from, cannot be right.

    Raises:
        ConfigurationError: names what is in the way.
    """
    pcp_ranks, _ = parallel_group("pcp")
    if pcp_ranks > 1:
        raise ConfigurationError(
            "prefill_context_parallel_size",
            expected="1: its ranks map one batch and read another",
            actual=str(pcp_ranks),
        )
    dcp_ranks, _ = parallel_group("dcp")
    if dcp_ranks > 1 and "ring" in kinds:
        raise ConfigurationError(
            f"kv_cache_groups[{kinds.index('ring')}] under decode context parallelism",
            expected="no circular group: vllm-ascend serves none there",
            actual="one",
        )
    if dcp_ranks > 1 and num_speculative_tokens:
        raise ConfigurationError(
            "num_speculative_tokens under decode context parallelism",
            expected="0: tables that hold each request once for every draft are not served",
            actual=str(num_speculative_tokens),
        )


def is_310p() -> bool:
    """Whether the vllm-ascend that is installed was built for the 310P."""
    try:
        built_for = import_module("vllm_ascend._build_info")
    except ImportError:
        return False
    return "310P" in str(getattr(built_for, "__device_type__", "")).upper()


def _layer_specs(spec: Any) -> Iterator[Any]:
    """A group's spec, or those of its layers where they are several."""
    if hasattr(spec, "kv_cache_specs"):
        for layer in spec.kv_cache_specs.values():
            yield from _layer_specs(layer)
    elif spec is not None:
        yield spec


def _is_a(spec: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(spec).__mro__)


def _is_circular(spec: Any) -> bool:
    return _is_a(spec, "CircularBufferSpec") or bool(getattr(spec, "is_circular", False))


def _compressed(blocks: int, spec: Any) -> int:
    """Blocks of a row whose group of several layer types keeps fewer tokens."""
    layers = list(_layer_specs(spec)) if hasattr(spec, "kv_cache_specs") else []
    ratio = getattr(layers[0], "compress_ratio", 1) if layers else 1
    return max(-(-blocks // ratio), 1)


def _candidates(
    kernel_sizes: Sequence[int | Sequence[int]] | None,
    block_sizes: Sequence[int],
    kinds: Sequence[str],
) -> list[list[int]]:
    """Per group, the kernel block sizes to choose from."""
    count = len(block_sizes)
    entries = [0] if kernel_sizes is None else list(kernel_sizes)
    if len(entries) == 1:
        entries *= count
    entries = list(per_group("kernel_sizes", entries, count))
    lists = [[entry] if isinstance(entry, int) else list(entry) for entry in entries]
    return [
        [size] if kind == "ring" else sizes
        for size, sizes, kind in zip(block_sizes, lists, kinds, strict=True)
    ]


def _first_divisor(g: int, block_size: int, sizes: list[int]) -> int:
    """The first candidate that divides the block; [0] leaves it whole.

    Raises:
        ConfigurationError: none does; names the group.
    """
    if sizes == [0]:
        return block_size
    for size in sizes:
        if size > 0 and block_size % size == 0:
            return size
    raise ConfigurationError(
        f"kernel_sizes[{g}]",
        expected=f"a divisor of block_sizes[{g}] ({block_size}) among them",
        actual=str(sizes),
    )
