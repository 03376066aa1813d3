"""A call behind the import of modules that the engine imports by itself, whenever it does.

To import them earlier is no way out: vllm-ascend patches vLLM before it loads what reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class LateImports(MetaPathFinder):
    """Finds nothing by itself; behind each module in `waiting` it calls `then`.

    Args:
        then: called with nothing, once a module has been executed.
    """

    def __init__(self, then: Callable[[], Any]) -> None:
        self._then = then
        self.waiting: set[str] = set()

    def wait_for(self, modules: set[str]) -> None:
        """Wait for these modules, none of which is loaded, and for no others."""
        self.waiting = modules
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if modules:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have, whose loader calls `then` at its end."""
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._follow(spec.loader)
                return spec  # type: ignore[no-any-return]
        return None

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self.waiting.discard(module.__name__)
            self._then()

        loader.exec_module = exec_module
