"""When a flight recorder writes a file by itself: on a signal, or for faults of chosen kinds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_slots import env
from fused_slots.faults import FaultCode
from fused_slots.logs import logger
from fused_slots.observe import process_rank

if TYPE_CHECKING:
    from fused_slots.base_tables import BaseTables

_requests = 0
"""Files that signals have asked for; recorders look at it behind every call."""
_files = 0
"""Files that this process has written by itself."""


class Triggers:
    """What asks for a file of one manager.

    Args:
        tables: the manager.
        num_calls: from one fault's file to the next, so that they share no call.
    """

    def __init__(self, tables: BaseTables, num_calls: int) -> None:
        self._seen_requests = _requests
        self._faults = FaultWatch(tables) if env.RECORD_FAULTS.read() else None
        self._num_calls, self._last_file = num_calls, -num_calls
        watch_signal()

    def reason(self, calls: int) -> str:
        """Why a file is to be written behind this call of the manager; "" = it is not."""
        if self._seen_requests != _requests:
            self._seen_requests = _requests
            return "on a signal"
        if self._faults is None or not self._faults.grew():
            return ""
        if calls - self._last_file < self._num_calls:
            return ""
        self._last_file = calls
        return "for a fault"


def write_file(save: Callable[[Path, str], Path], reason: str) -> None:
    """Write a file into the folder for it; whatever goes wrong, the engine goes on."""
    global _files
    folder = env.RECORD_DIR.read()
    if not folder:
        logger.warning("No recording is written %s: FUSED_SLOTS_RECORD_DIR is not set", reason)
        return
    _files += 1
    name = f"fused_slots-rank{process_rank()}-pid{os.getpid()}-{_files}.npz.xz"
    try:
        logger.warning("Recording written %s: %s", reason, save(Path(folder, name), reason))
    except Exception as error:
        logger.warning("No recording is written %s: %s: %s", reason, type(error).__name__, error)


class FaultWatch:
    """Looks at the counters of chosen faults, without waiting for the device.

    Raises:
        ConfigurationError: FUSED_SLOTS_RECORD_FAULTS names a fault that there is not.
    """

    def __init__(self, tables: BaseTables) -> None:
        names = env.record_faults()
        self._codes = [code for code in FaultCode if code.name.lower() in names or "any" in names]
        self._reader = tables._backend.fault_reader()
        self._last = 0
        self._reader.start()

    def grew(self) -> bool:
        """Whether there are more than the last time; a call or two late."""
        if not self._reader.arrived():
            return False
        count = int(self._reader.read()[self._codes].sum())
        self._reader.start()
        grew, self._last = count > self._last, count
        return grew


def watch_signal() -> None:
    """Let FUSED_SLOTS_RECORD_SIGNAL ask all recorders for a file, behind their next calls."""
    choice = env.RECORD_SIGNAL.read()
    if not choice:
        return
    number = getattr(signal, f"SIG{choice.upper()}")
    before = signal.getsignal(number)
    if getattr(before, "is_fused_slots", False):
        return

    def handler(signum: int, frame: Any) -> None:
        global _requests
        _requests += 1
        if callable(before):
            before(signum, frame)

    handler.is_fused_slots = True  # type: ignore[attr-defined]
    try:
        signal.signal(number, handler)
    except ValueError:
        logger.warning("SIG%s writes no recording: this is not the main thread", choice.upper())
