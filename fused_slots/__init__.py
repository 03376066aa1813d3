"""All KV cache groups' block tables and slot mappings of an LLM engine, in one launch a step."""

from fused_slots import reference as reference
from fused_slots.block_tables import AscendBlockTables
from fused_slots.faults import BlockTableError
from fused_slots.groups import (
    PAD_SLOT_ID,
    ContextParallel,
    KVCacheGroup,
    SlotMappingMode,
    get_block_table_width,
)

__version__ = "0.1.0"

__all__ = [
    "PAD_SLOT_ID",
    "AscendBlockTables",
    "BlockTableError",
    "ContextParallel",
    "KVCacheGroup",
    "SlotMappingMode",
    "get_block_table_width",
]
