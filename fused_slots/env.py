"""Every FUSED_SLOTS_* environment variable, typed, in one place.

Variables are read when they are asked for, not at import, so a process may set them late.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fused_slots.faults import ConfigurationError, FaultCode


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the values it takes, its default and its meaning.

    A `number` also takes any non-negative integer; where `text` says what it is, any text is taken
    as it stands.
    """

    name: str
    choices: tuple[str, ...]
    default: str
    meaning: str
    number: bool = False
    text: str = ""

    def read(self) -> str:
        """The variable's value in lower case, or its default.

        Raises:
            ConfigurationError: the value is none of `choices`.
        """
        value = os.environ.get(self.name, "").strip()
        if self.text:
            return value or self.default
        value = value.lower() or self.default
        if value not in self.choices and not (self.number and value.isdecimal()):
            known = [*filter(None, self.choices), *(["a whole number"] if self.number else [])]
            raise ConfigurationError(self.name, expected=" or ".join(known), actual=repr(value))
        return value


BACKEND = Variable(
    "FUSED_SLOTS_BACKEND",
    ("", "cpu", "cuda", "ascend", "interpreter"),
    "",
    "Backend to use instead of the one that the device's type selects",
)
CHECKED = Variable(
    "FUSED_SLOTS_CHECKED", ("0", "1"), "0", "1: record the first device faults in detail"
)
HOST = Variable(
    "FUSED_SLOTS_HOST",
    ("auto", "native", "python"),
    "auto",
    "How appends are staged: by the compiled half where it was built, by it alone, or in Python",
)
NULL_BLOCK = Variable(
    "FUSED_SLOTS_NULL_BLOCK",
    ("",),
    "",
    "The allocation block that is never written: its tokens become PAD and a counted fault",
    number=True,
)
VLLM = Variable(
    "FUSED_SLOTS_VLLM",
    ("auto", "strict", "off"),
    "auto",
    "vLLM plugin: replace its block tables when they fit, insist on it, or stay off",
)
VLLM_MAMBA = Variable(
    "FUSED_SLOTS_VLLM_MAMBA",
    ("paged", "none"),
    "paged",
    "vLLM plugin: map slots of Mamba groups in the v2 runner as vLLM does, or pad them all",
)
WARMUP = Variable(
    "FUSED_SLOTS_WARMUP", ("1", "0"), "1", "0: the plugin compiles no kernel at construction"
)

PLAN = Variable(
    "FUSED_SLOTS_PLAN",
    ("auto", "by_request"),
    "auto",
    "by_request: map slots over the grid (group_count, num_reqs * tiles + 1), the base case; "
    "GPUs only",
)

METRICS = Variable(
    "FUSED_SLOTS_METRICS",
    ("0",),
    "0",
    "Seconds between two updates of Prometheus metrics, made before a call; 0: there are none",
    number=True,
)
METRICS_DIR = Variable(
    "FUSED_SLOTS_METRICS_DIR",
    ("",),
    "",
    "Folder, which must exist, of one file of metrics a process where PROMETHEUS_MULTIPROC_DIR is "
    "not set",
    text="a folder",
)
NVTX = Variable("FUSED_SLOTS_NVTX", ("0", "1"), "0", "1: an NVTX range around every launch")
RECORD = Variable(
    "FUSED_SLOTS_RECORD",
    ("0",),
    "0",
    "Calls of every manager that a recording begins with at the latest; 0: nothing is recorded",
    number=True,
)
RECORD_DIR = Variable(
    "FUSED_SLOTS_RECORD_DIR",
    ("",),
    "",
    "Folder, which must exist, of recordings that a signal or a fault asks for",
    text="a folder",
)
RECORD_FAULTS = Variable(
    "FUSED_SLOTS_RECORD_FAULTS",
    ("",),
    "",
    "Faults that write a recording, such as `null_block,column_out_of_row`, or `any`",
    text="names of faults",
)
RECORD_SIGNAL = Variable(
    "FUSED_SLOTS_RECORD_SIGNAL",
    ("", "usr1", "usr2"),
    "",
    "Signal that writes a recording of every manager of the process behind its next call",
)

VARIABLES = (
    *(BACKEND, CHECKED, HOST, METRICS, METRICS_DIR, NULL_BLOCK, NVTX, PLAN),
    *(RECORD, RECORD_DIR, RECORD_FAULTS, RECORD_SIGNAL),
    *(VLLM, VLLM_MAMBA, WARMUP),
)


def checked() -> bool:
    """Whether FUSED_SLOTS_CHECKED asks for detailed faults."""
    return CHECKED.read() == "1"


def null_block_id() -> int | None:
    """The block that FUSED_SLOTS_NULL_BLOCK names; None where it is unset."""
    value = NULL_BLOCK.read()
    return int(value) if value else None


def record_faults() -> frozenset[str]:
    """The names in FUSED_SLOTS_RECORD_FAULTS, in lower case.

    Raises:
        ConfigurationError: one is no fault's.
    """
    names = [name.strip().lower() for name in RECORD_FAULTS.read().split(",") if name.strip()]
    known = ["any", *(code.name.lower() for code in FaultCode)]
    for name in names:
        if name not in known:
            expected = ", ".join(known)
            raise ConfigurationError(RECORD_FAULTS.name, expected=expected, actual=repr(name))
    return frozenset(names)
