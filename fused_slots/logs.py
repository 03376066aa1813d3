"""The package's logger, for whatever stands back, falls back or is refused."""

from __future__ import annotations

import logging

logger = logging.getLogger("fused_slots")


def follow(name: str) -> None:
    """Send what the package logs to the handlers of another logger too.

    In vLLM's workers loggers outside the name `vllm` have no handler.

    Args:
        name: the other logger, whose level then counts for ours.
    """
    if not any(isinstance(handler, _Forward) for handler in logger.handlers):
        logger.addHandler(_Forward(name))
        logger.propagate = False
        logger.setLevel(logging.DEBUG)


class _Forward(logging.Handler):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._target = logging.getLogger(name)

    def emit(self, record: logging.LogRecord) -> None:
        if self._target.isEnabledFor(record.levelno):
            self._target.handle(record)
