"""The engines' releases that the plugin knows: one contract a release line."""

from fused_slots.vllm.releases.contract import (
    Contract,
    Methods,
    Runner,
    Tables,
    method_mismatches,
)
from fused_slots.vllm.releases.vllm import CONTRACTS as VLLM_CONTRACTS

__all__ = [
    "VLLM_CONTRACTS",
    "Contract",
    "Methods",
    "Runner",
    "Tables",
    "method_mismatches",
]
