"""Names of other modules and classes that were replaced, and how to put them back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """What was replaced, with its first original; `restore` undoes everything."""

    def __init__(self) -> None:
        self._originals: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    def put(self, owner: Any, name: str, value: object) -> None:
        """Set `owner.name`; the value it had before the first call is kept."""
        original = vars(owner).get(name, _ABSENT)
        if self.has(owner, name):
            original = self._originals[id(owner), name][1]
        self._originals[id(owner), name] = owner, original, value
        setattr(owner, name, value)

    def has(self, owner: Any, name: str) -> bool:
        """Whether `owner.name` was replaced."""
        return (id(owner), name) in self._originals

    def original(self, owner: Any, name: str) -> Any:
        """What `owner.name` was before it was replaced, or what it is."""
        if self.has(owner, name):
            return self._originals[id(owner), name][1]
        return vars(owner).get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The replaced names, in full."""
        targets = [(owner, name) for (_, name), (owner, _, _) in self._originals.items()]
        return tuple(f"{_name(owner)}.{name}" for owner, name in targets)

    def restore(self) -> None:
        """Put every original back, the last first; a name that has another value by now stays."""
        for (_, name), (owner, original, value) in reversed(self._originals.items()):
            if vars(owner).get(name) is not value:
                continue
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()


def _name(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(owner.__name__)


PATCHES = Patches()
"""This process's patches: vLLM calls `register` several times, and all calls share them."""
