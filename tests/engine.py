"""The engine's side of the simulator: requests, block pools, and who owns which slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from fused_slots import SlotMappingMode
from tests.configuration import Config
from tests.model import Mismatch

NULL_BLOCK = 0


@dataclass
class Request:
    """One request: `computed` tokens are settled; `blocks` are its allocation blocks per group."""

    uid: int
    prompt_len: int
    target_len: int
    blocks: list[list[int]]
    row: int = -1
    computed: int = 0
    replay_start: int = 0
    fresh: bool = True
    """Whether the next append starts its row anew."""

    @property
    def finished(self) -> bool:
        return self.computed >= self.target_len


class Pools:
    """Per group a pool of allocation blocks with reference counts; block 0 is never dealt."""

    def __init__(self, config: Config, rng: Random) -> None:
        self.free: list[list[int]] = []
        self.references: list[dict[int, int]] = []
        for first, count in zip(config.first_ids, config.pool_sizes, strict=True):
            ids = list(range(first, first + count))
            rng.shuffle(ids)
            self.free.append(ids)
            self.references.append({})

    def take(self, counts: list[int]) -> list[list[int]] | None:
        """That many blocks of each group, or None when one pool is too small."""
        if any(count > len(free) for count, free in zip(counts, self.free, strict=True)):
            return None
        taken = []
        for g, count in enumerate(counts):
            ids = [self.free[g].pop() for _ in range(count)]
            self.references[g].update(dict.fromkeys(ids, 1))
            taken.append(ids)
        return taken

    def share(self, g: int, ids: list[int]) -> None:
        for block_id in ids:
            if block_id != NULL_BLOCK:
                self.references[g][block_id] += 1

    def release(self, blocks: list[list[int]]) -> None:
        for g, ids in enumerate(blocks):
            for block_id in ids:
                if block_id == NULL_BLOCK:
                    continue
                self.references[g][block_id] -= 1
                if not self.references[g][block_id]:
                    del self.references[g][block_id]
                    self.free[g].append(block_id)


@dataclass
class SlotOwners:
    """Who has written each slot: no two live tokens of a group may have one slot.

    It knows nothing of the formula: it sees slots, and which request and position wrote them.
    """

    config: Config
    owner: list[dict[int, tuple[int, int]]] = field(default_factory=list)
    slots_of: list[dict[int, list[int]]] = field(default_factory=list)
    tokens_seen: int = 0

    def __post_init__(self) -> None:
        self.owner = [{} for _ in self.config.groups]
        self.slots_of = [{} for _ in self.config.groups]

    def write(self, g: int, slot: int, uid: int, position: int, pools: Pools) -> None:
        """Record that a request's token was written to a slot."""
        if slot < 0:
            return
        group = self.config.groups[g]
        self.tokens_seen += 1
        block_id = slot // group.block_size
        if pools.references[g].get(block_id, 0) != 1:
            raise Mismatch(
                f"group {g}: slot {slot} is in block {block_id}, which has "
                f"{pools.references[g].get(block_id, 0)} owners"
            )
        if group.circular:
            position = -1
        seen = self.owner[g].setdefault(slot, (uid, position))
        if seen != (uid, position):
            raise Mismatch(
                f"group {g}: slot {slot} is token {seen[1]} of request {seen[0]} and token "
                f"{position} of request {uid}"
            )
        self.slots_of[g].setdefault(uid, []).append(slot)

    def release(self, uid: int) -> None:
        """Forget a request whose blocks went back to the pool."""
        for owner, slots_of in zip(self.owner, self.slots_of, strict=True):
            for slot in slots_of.pop(uid, ()):
                owner.pop(slot, None)

    def forget(self, uid: int, blocks: list[list[int]]) -> None:
        """Forget a request's tokens in blocks that it gave back."""
        for g, (owner, slots_of) in enumerate(zip(self.owner, self.slots_of, strict=True)):
            size, gone = self.config.groups[g].block_size, set(blocks[g])
            for slot in slots_of.get(uid, ()):
                if slot // size in gone and owner.get(slot, (uid, 0))[0] == uid:
                    owner.pop(slot, None)


class Engine:
    """Admits, grows, preempts and finishes requests; deals blocks. Knows no manager."""

    def __init__(self, config: Config, rng: Random) -> None:
        self.config = config
        self.rng = rng
        self.pools = Pools(config, rng)
        self.owners = SlotOwners(config)
        self.running: list[Request] = []
        """In batch order."""
        self.waiting: list[Request] = []
        self.free_rows = list(range(config.max_num_reqs))
        self._next_uid = 0

    def new_request(self) -> Request:
        rng, longest = self.rng, self.config.max_model_len
        target = rng.randint(1, longest)
        prompt = rng.randint(1, target)
        return Request(self._uid(), prompt, target, [[] for _ in self.config.groups])

    def place(self, request: Request) -> None:
        """Give a request a row; sometimes it starts from another request's cached prefix."""
        request.row = self.free_rows.pop(self.rng.randrange(len(self.free_rows)))
        request.fresh, request.computed, request.replay_start = True, 0, 0
        self.running.insert(self.rng.randint(0, len(self.running)), request)

    def hit_prefix(self, request: Request, donor: Request) -> bool:
        """Start a placed request from the donor's blocks; what was computed last is replayed."""
        hit = self.rng.randint(0, min(donor.computed, request.target_len - 1))
        window = self.config.replay_window
        request.replay_start = hit - window if 0 < window < hit else 0
        request.computed = request.replay_start or hit
        for g, group in enumerate(self.config.groups):
            shared = hit // self.config.tokens_per_block(g)
            paged = group.slot_mapping_mode is not SlotMappingMode.NONE and not group.circular
            if not (group.prefix_cacheable and paged and shared):
                continue
            ids = donor.blocks[g][:shared]
            below = request.computed - group.sliding_window_reach
            if group.sliding_window_reach and below > 0:
                nulls = min(below // self.config.tokens_per_block(g), shared)
                ids = [NULL_BLOCK] * nulls + ids[nulls:]
            self.pools.share(g, ids)
            request.blocks[g] = list(ids)
        return request.computed > 0

    def missing_blocks(self, request: Request, num_tokens: int) -> list[int]:
        """Blocks that a request lacks to hold that many tokens, now and then some to spare."""
        counts = []
        for g, group in enumerate(self.config.groups):
            held = len(request.blocks[g])
            if group.circular:
                counts.append(1 - held)
            elif group.slot_mapping_mode is SlotMappingMode.NONE:
                counts.append(0 if held else self.rng.randint(1, group.max_num_blocks))
            else:
                needed = -(-num_tokens // self.config.tokens_per_block(g))
                spare = int(needed < group.max_num_blocks and self.rng.random() < 0.1)
                counts.append(max(needed + spare - held, 0))
        return counts

    def rewind(self, request: Request, computed: int) -> tuple[list[int], list[list[int]]]:
        """Take back tokens of a request and the blocks behind them; some come anew at once.

        Returns:
            Per group the blocks that stay, and the new ones that follow.
        """
        keep, counts = [], []
        for g, group in enumerate(self.config.groups):
            held = len(request.blocks[g])
            paged = group.slot_mapping_mode is not SlotMappingMode.NONE and not group.circular
            needed = -(-computed // self.config.tokens_per_block(g)) if paged else held
            keep.append(min(needed, held))
            counts.append(self.rng.randint(0, held - keep[g]))
        dropped = [blocks[k:] for blocks, k in zip(request.blocks, keep, strict=True)]
        self.pools.release(dropped)
        self.owners.forget(request.uid, dropped)
        new = self.pools.take(counts) or [[] for _ in counts]
        request.blocks = [b[:k] + n for b, k, n in zip(request.blocks, keep, new, strict=True)]
        request.computed = computed
        return keep, new

    def first_rewindable(self, request: Request) -> int:
        """Tokens below lie in blocks that others share."""
        floor = 0
        for g, blocks in enumerate(request.blocks):
            for place, block_id in enumerate(blocks):
                if block_id == NULL_BLOCK or self.pools.references[g][block_id] > 1:
                    floor = max(floor, (place + 1) * self.config.tokens_per_block(g))
        return floor

    def stop(self, request: Request) -> None:
        """Take a request off its row and its blocks away."""
        self.running.remove(request)
        self.free_rows.append(request.row)
        self.pools.release(request.blocks)
        self.owners.release(request.uid)
        request.blocks = [[] for _ in self.config.groups]
        request.row = -1

    def preempt(self, request: Request) -> None:
        """Stop a request; it comes back later as a new one with its tokens to compute again."""
        self.stop(request)
        request.uid = self._uid()
        request.prompt_len = max(request.prompt_len, request.computed)
        self.waiting.append(request)

    def _uid(self) -> int:
        self._next_uid += 1
        return self._next_uid
