"""The package's logger, for whatever stands back, falls back or is refused."""

from __future__ import annotations

import logging

logger = logging.getLogger("fused_slots")


def follow(name: str) -> None:
    """Let another logger's level and handlers, and those above it, count for the package's.

    In vLLM's workers loggers outside the name `vllm` have no handler.
    """
    logger.parent = logging.getLogger(name)
    logger.setLevel(logger.level)  # what was disabled for the old parent's level is asked anew
