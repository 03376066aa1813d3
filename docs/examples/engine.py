"""A small LLM engine: scheduler, prefix cache, prefill, decode, preemption, three groups."""

from collections import Counter, deque
from dataclasses import dataclass, field

import torch
from toy import BLOCK, WINDOW, Model, answer, check

from fused_slots import AscendBlockTables, KVCacheGroup, SlotMappingMode

FULL, SLIDING, STATE = range(3)
MAX_REQS, MAX_TOKENS = 4, 16  # rows of the tables, tokens of one step
GROUPS = [
    KVCacheGroup(BLOCK, max_num_blocks=32, name="full"),
    KVCacheGroup(BLOCK, max_num_blocks=32, name="sliding", sliding_window_reach=WINDOW - 1,
                 prefix_cacheable=False),
    KVCacheGroup(128, max_num_blocks=1, name="state", slot_mapping_mode=SlotMappingMode.NONE),
]  # fmt: skip
POOL_SIZES = [20, 20, MAX_REQS + 1]  # blocks of each group; block 0 is never handed out


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


@dataclass(eq=False)
class Request:
    tokens: list[int]  # the prompt, and what was generated
    length: int  # at which it ends
    row: int = -1
    computed: int = 0
    replay: range = range(0)  # positions that are computed again
    blocks: list[list[int]] = field(default_factory=list)


class Engine:
    def __init__(self, device: str = "cpu") -> None:
        self.tables = AscendBlockTables.from_groups(
            GROUPS, max_num_reqs=MAX_REQS, max_num_batched_tokens=MAX_TOKENS,
            num_blocks=POOL_SIZES, device=device)  # fmt: skip
        self.model = Model(POOL_SIZES, self.tables.device)
        self.pools = [BlockPool(size) for size in POOL_SIZES]
        self.rows = list(range(MAX_REQS))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.count: Counter[str] = Counter()

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        self.waiting.append(Request(list(prompt), len(prompt) + max_tokens))
        return self.waiting[-1]

    # [schedule]
    def schedule(self) -> dict[Request, int]:
        """Who computes how many tokens in this step: who runs goes first, then who waits."""
        batch: dict[Request, int] = {}
        for request in list(self.running):
            n = min(len(request.tokens) - request.computed, MAX_TOKENS - sum(batch.values()))
            while request in self.running and not self.grow(request, n):
                self.preempt(self.running[-1])
            if request in self.running and n:
                batch[request] = n
        while self.waiting and self.rows and sum(batch.values()) < MAX_TOKENS:
            request = self.waiting[0]
            self.admit(request)
            n = min(len(request.tokens) - request.computed, MAX_TOKENS - sum(batch.values()))
            if not self.grow(request, n):
                self.release(request)
                break
            self.running.append(self.waiting.popleft())
            batch[request] = n
        return batch

    # [blocks]
    def admit(self, request: Request) -> None:
        """Give a request a row, and the blocks of its longest beginning that is cached."""
        hits: list[int] = []
        for end in range(BLOCK, len(request.tokens), BLOCK):  # one token at least is computed
            block = self.pools[FULL].cached.get(tuple(request.tokens[:end]))
            if block is None:
                break
            hits.append(self.pools[FULL].share(block))
        # Window and state are the request's own: the last hits are computed again to fill them.
        request.replay = range(max(len(hits) * BLOCK - WINDOW, 0), len(hits) * BLOCK)
        request.computed = request.replay.start
        request.blocks = [hits, [0] * (request.computed // BLOCK), [self.pools[STATE].take()]]
        self.model.states[request.blocks[STATE][0]] = 0
        request.row = self.rows.pop()
        self.tables.append_block_ids(request.row, request.blocks, overwrite=True)
        self.count["tokens skipped"] += request.computed

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request the blocks of its next tokens, if there are enough."""
        end = -(-(request.computed + num_tokens) // BLOCK)
        missing = [max(end - len(request.blocks[g]), 0) for g in (FULL, SLIDING)]
        if any(n > len(self.pools[g].free) for g, n in enumerate(missing)):
            return False
        new = [[self.pools[g].take() for _ in range(n)] for g, n in enumerate(missing)]
        self.tables.append_block_ids(request.row, [*new, []], overwrite=False)
        for blocks, more in zip(request.blocks, new, strict=False):
            blocks += more
        return True

    def release(self, request: Request) -> None:
        for pool, blocks in zip(self.pools, request.blocks, strict=True):
            pool.give_back(blocks)
        self.tables.clear_row(request.row)
        self.rows.append(request.row)

    def preempt(self, request: Request) -> None:
        self.release(request)
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.count["preemptions"] += 1

    # [step]
    def step(self) -> None:
        """Schedule, map every token of every group in one launch, run the model, keep its words."""
        batch = self.schedule()
        computed = torch.zeros(MAX_REQS, dtype=torch.int32)
        for request in batch:
            computed[request.row] = request.computed
        spans = [range(request.computed, request.computed + n) for request, n in batch.items()]
        per_entry = {
            "idx_mapping": [request.row for request in batch],
            "query_start_loc": [sum(map(len, spans[:b])) for b in range(len(spans) + 1)],
            "replay_start": [request.replay.start for request in batch],
            "replay_len": [len(request.replay) for request in batch],
        }
        inputs = {name: torch.tensor(x, dtype=torch.int32) for name, x in per_entry.items()}
        inputs["positions"] = torch.tensor([p for span in spans for p in span])
        inputs["num_computed_tokens"] = computed
        inputs = {name: tensor.to(self.tables.device) for name, tensor in inputs.items()}
        block_tables, slots = self.tables.step(**inputs)
        self.free_below_windows(batch)
        check(self.tables, list(batch), inputs, block_tables, slots)
        tokens = [t for r, n in batch.items() for t in r.tokens[r.computed : r.computed + n]]
        said = self.model.forward(tokens, inputs, block_tables, slots)
        for (request, n), token in zip(batch.items(), said, strict=True):
            self.after(request, n, token)
        self.count["steps"] += 1

    def free_below_windows(self, batch: dict[Request, int]) -> None:
        """Blocks below a window are never read again: the gather has nulled their columns."""
        for request in batch:
            end = max(request.computed - (WINDOW - 1), 0) // BLOCK
            self.pools[SLIDING].give_back(request.blocks[SLIDING][:end])
            request.blocks[SLIDING][:end] = [0] * end

    def after(self, request: Request, num_tokens: int, token: int) -> None:
        """Cache the blocks that are full now; keep the token if the prompt has been read."""
        request.computed += num_tokens
        for end in range(BLOCK, request.computed + 1, BLOCK):
            block = request.blocks[FULL][end // BLOCK - 1]
            self.pools[FULL].cached.setdefault(tuple(request.tokens[:end]), block)
        if request.computed == len(request.tokens):
            request.tokens.append(token)
        if len(request.tokens) == request.length:
            self.release(request)
            self.running.remove(request)


# [main]
def main(device: str = "cpu") -> Engine:
    engine = Engine(device)
    beginning = list(range(100, 117))  # every prompt begins alike
    prompts = [[*beginning, *range(n, 3 * n)] for n in range(1, 9)]
    requests = [engine.add(prompt, max_tokens=16) for prompt in prompts]
    while engine.running or engine.waiting:
        engine.step()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == answer(prompt, max_tokens=16), "not what the model says"
    assert not engine.tables.take_faults()
    print(f"{len(requests)} answers are right:", dict(engine.count))
    return engine


if __name__ == "__main__":
    main()
