"""What happens when vLLM constructs a class of ours and it cannot be built.

The plugin has replaced a name in vLLM, so vLLM's own class would never be built. In mode `auto` it
is built after all, with one warning, whether we refuse the configuration, have no backend for the
device, or a kernel does not compile; in mode `strict` the error reaches the user.
"""

from __future__ import annotations

import logging
from typing import Any

from fused_slots import env
from fused_slots.faults import BlockTableError

logger = logging.getLogger("vllm.plugins.fused_slots")
"""Below `vllm`, because loggers outside that name have no handler in vLLM's workers."""


class FallsBack(type):
    """Metaclass: calling the class may give an instance of `stock`, the class it stands in for.

    `stock` is None unless the plugin has put the class in another's place; errors then pass.
    """

    stock: type | None = None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            if cls.stock is None or env.VLLM.read() == "strict":
                raise
            logger.warning(
                "fused_slots stands back for %s: %s",
                cls.stock.__qualname__,
                error,
                exc_info=not isinstance(error, BlockTableError),
            )
            return cls.stock(*args, **kwargs)
