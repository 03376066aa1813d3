"""All KV cache groups' block tables and slot mappings of an LLM engine, in one launch a step."""

from typing import TYPE_CHECKING

from fused_slots import reference as reference
from fused_slots.faults import (
    BackendUnavailableError,
    BlockIdError,
    BlockTableError,
    ConfigurationError,
    Fault,
    FaultCode,
    IntegrityError,
    InvalidArgumentError,
    RowCapacityError,
)
from fused_slots.groups import (
    PAD_SLOT_ID,
    ContextParallel,
    KVCacheGroup,
    SlotMappingMode,
    get_block_table_width,
)
from fused_slots.request_slots import kernel_block_ids, slots_of

if TYPE_CHECKING:
    from fused_slots.block_tables import AscendBlockTables

    BlockTables = AscendBlockTables

__version__ = "0.1.0"

__all__ = [
    "PAD_SLOT_ID",
    "AscendBlockTables",
    "BackendUnavailableError",
    "BlockIdError",
    "BlockTableError",
    "BlockTables",
    "ConfigurationError",
    "ContextParallel",
    "Fault",
    "FaultCode",
    "IntegrityError",
    "InvalidArgumentError",
    "KVCacheGroup",
    "RowCapacityError",
    "SlotMappingMode",
    "get_block_table_width",
    "kernel_block_ids",
    "slots_of",
]


def __getattr__(name: str) -> object:
    # torch takes seconds to import, and what needs no manager (the command line's help, vLLM's
    # look at its plug-ins) needs no torch.
    if name not in ("AscendBlockTables", "BlockTables"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fused_slots.block_tables import AscendBlockTables

    return AscendBlockTables
