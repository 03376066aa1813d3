"""Block ids of engine.py: who uses them, which are free, which are a prefix hit."""

from collections import Counter


class BlockPool:
    """Block ids of one group. A block that is free stays a prefix hit until it is taken."""

    def __init__(self, num_blocks: int) -> None:
        self.free = dict.fromkeys(range(1, num_blocks))  # a set in order, the oldest first
        self.users: Counter[int] = Counter()
        self.cached: dict[tuple[int, ...], int] = {}  # a text's beginning -> its last block

    def take(self) -> int:
        block = next(iter(self.free))
        self.cached = {text: other for text, other in self.cached.items() if other != block}
        return self.share(block)

    def share(self, block: int) -> int:
        self.free.pop(block, None)
        self.users[block] += 1
        return block

    def give_back(self, blocks: list[int]) -> None:
        for block in filter(None, blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None
