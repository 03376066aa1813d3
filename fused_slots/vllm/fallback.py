"""What happens when the engine constructs a class of ours and it cannot be built.

The plugin has replaced a name in the engine, so its own class would never be built. In mode `auto`
it is built after all, with one warning, whether we refuse the configuration, have no backend for
the device, or a kernel does not compile; in mode `strict` the error reaches the user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fused_slots import env
from fused_slots.faults import BlockTableError
from fused_slots.logs import logger


class FallsBack(type):
    """Metaclass: calling the class may give an instance of `stock`, the class it stands in for.

    `stock` is None unless the plugin has put the class in another's place; errors then pass, as
    they do from classes derived from it. `arguments` names the stock class's, in their order: ours
    is given them by name. `built` is called behind each construction in the engine.
    """

    stock: type | None = None
    arguments: tuple[str, ...] = ()
    built: Callable[[], None] = staticmethod(lambda: None)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        stock = vars(cls).get("stock")
        if stock is None:
            tables = super().__call__(*args, **kwargs)
            if cls.stock is not None:
                cls.built()
            return tables
        try:
            if len(args) > len(cls.arguments):
                raise TypeError(f"{len(args)} arguments, of which {len(cls.arguments)} have names")
            named = dict(zip(cls.arguments, args, strict=False))
            tables = super().__call__(**named, **kwargs)
            cls.built()
            return tables
        except Exception as error:
            if env.VLLM.read() == "strict":
                raise
            logger.warning(
                "fused_slots stands back for %s: %s",
                stock.__qualname__,
                error,
                exc_info=not isinstance(error, BlockTableError),
            )
            return stock(*args, **kwargs)
