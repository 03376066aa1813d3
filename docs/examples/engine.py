"""A small LLM engine: scheduler, prefix cache, prefill, decode, preemption, three groups."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile

import torch
from blocks import BlockPool
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
POOL_SIZES = [18, 18, MAX_REQS + 1]  # blocks of each group; block 0 is never handed out


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
        self.requests: list[Request] = []  # in their order; the first ones run, the others wait
        self.count: Counter[str] = Counter()

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        self.requests.append(Request(list(prompt), len(prompt) + max_tokens))
        return self.requests[-1]

    # [schedule]
    def schedule(self) -> dict[Request, range]:
        """Who computes which positions in this step."""
        batch: dict[Request, range] = {}
        for request in self.requests:
            room = MAX_TOKENS - sum(map(len, batch.values()))
            if room == 0 or (request.row < 0 and not self.rows):
                break
            if request.row < 0:
                self.admit(request)
            end = min(request.computed + room, len(request.tokens))
            while not self.grow(request, end):
                last = [other for other in self.requests if other.row >= 0][-1]
                self.release(last)
                if last is request:
                    return batch
                self.count["preemptions"] += 1
            batch[request] = range(request.computed, end)
        return batch

    # [blocks]
    def admit(self, request: Request) -> None:
        """Give a request a row, and the blocks of its longest beginning that is cached."""
        pool, tokens = self.pools[FULL], request.tokens
        ends = range(BLOCK, len(tokens), BLOCK)  # one token at least is computed
        cached = (pool.cached.get(tuple(tokens[:end])) for end in ends)
        hits = [pool.share(block) for block in takewhile(bool, cached)]
        # Window and state are the request's own: the last hits are computed again to fill them.
        request.replay = range(max(len(hits) * BLOCK - WINDOW, 0), len(hits) * BLOCK)
        request.computed = request.replay.start
        request.blocks = [hits, [0] * (request.computed // BLOCK), [self.pools[STATE].take()]]
        self.model.states[request.blocks[STATE][0]] = 0
        request.row = self.rows.pop()
        self.tables.append_block_ids(request.row, request.blocks, overwrite=True)
        self.count["tokens skipped"] += request.computed

    def grow(self, request: Request, end: int) -> bool:
        """Give a request the blocks of its tokens below `end`, if there are enough."""
        missing = [max(-(-end // BLOCK) - len(request.blocks[g]), 0) for g in (FULL, SLIDING)]
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
        request.row = -1

    # [step]
    def step(self) -> None:
        """Schedule, map every token of every group in one launch, run the model, keep its words."""
        batch = self.schedule()
        computed = {request.row: request.computed for request in batch}
        int32 = partial(torch.tensor, dtype=torch.int32, device=self.tables.device)
        inputs = {
            "idx_mapping": int32([request.row for request in batch]),
            "query_start_loc": int32([0, *accumulate(map(len, batch.values()))]),
            "positions": int32([p for span in batch.values() for p in span]).long(),
            "replay_start": int32([request.replay.start for request in batch]),
            "replay_len": int32([len(request.replay) for request in batch]),
            "num_computed_tokens": int32([computed.get(row, 0) for row in range(MAX_REQS)]),
        }
        block_tables, slots = self.tables.step(**inputs)
        self.free_below_windows(batch)
        check(self.tables, list(batch), inputs, block_tables, slots)
        tokens = [request.tokens[p] for request, span in batch.items() for p in span]
        said = self.model.forward(tokens, inputs, block_tables, slots)
        for (request, span), token in zip(batch.items(), said, strict=True):
            self.after(request, span.stop, token)
        self.count["steps"] += 1

    def free_below_windows(self, batch: dict[Request, range]) -> None:
        """Blocks below a window are never read again: the gather has nulled their columns."""
        for request in batch:
            end = max(request.computed - (WINDOW - 1), 0) // BLOCK
            self.pools[SLIDING].give_back(request.blocks[SLIDING][:end])
            request.blocks[SLIDING][:end] = [0] * end

    def after(self, request: Request, computed: int, token: int) -> None:
        """Cache the blocks that are full now; keep the token if the prompt has been read."""
        request.computed = computed
        for end in range(BLOCK, request.computed + 1, BLOCK):
            block = request.blocks[FULL][end // BLOCK - 1]
            self.pools[FULL].cached.setdefault(tuple(request.tokens[:end]), block)
        if request.computed == len(request.tokens):
            request.tokens.append(token)
        if len(request.tokens) == request.length:
            self.release(request)
            self.requests.remove(request)


# [main]
def main(device: str = "cpu") -> Engine:
    engine = Engine(device)
    beginning = list(range(100, 117))  # every prompt begins alike
    prompts = [[*beginning, *range(n, 3 * n)] for n in range(1, 9)]
    requests = [engine.add(prompt, max_tokens=16) for prompt in prompts]
    while engine.requests:
        engine.step()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == answer(prompt, max_tokens=16), "not what the model says"
    assert not engine.tables.take_faults()
    print(f"{len(requests)} answers are right:", dict(engine.count))
    return engine


if __name__ == "__main__":
    main()
