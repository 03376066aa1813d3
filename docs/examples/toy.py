"""A model of arithmetic for engine.py, and what checks the engine.

The model's next token depends on each earlier token that it reads back from its caches, so a
wrong slot gives another answer, and `answer` says what is right.
"""

from functools import partial
from itertools import pairwise

import torch

from fused_slots import reference

BLOCK, WINDOW, CONV, VOCAB = 4, 8, 4, 1000  # tokens of a block, a window and a state; token ids


def next_token(full, window, state) -> int:
    """From all tokens so far, those of the window and those that the state holds."""
    order = torch.arange(1, len(full) + 1, device=full.device)
    return int((full * order).sum() + 3 * (window * order[: len(window)]).sum() + state[-1]) % VOCAB


def answer(prompt: list[int], max_tokens: int) -> list[int]:
    """The prompt and what the model says, without any cache."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        past = torch.tensor(tokens)
        tokens.append(next_token(past, past[-WINDOW:], past[-CONV:]))
    return tokens


class Model:
    """Caches of three groups: full attention, a sliding window, a convolution's state."""

    def __init__(self, pool_sizes: list[int], device: torch.device) -> None:
        full, sliding, states = pool_sizes
        new = partial(torch.zeros, dtype=torch.int64, device=device)
        self.caches, self.states = [new(full * BLOCK), new(sliding * BLOCK)], new(states, CONV)

    def forward(self, tokens, inputs, block_tables, slots) -> list[int]:
        """Write every token into the caches, then read each request's past back from them."""
        tokens = torch.tensor(tokens, device=slots.device)
        for cache, group_slots in zip(self.caches, slots[:2, : len(tokens)], strict=True):
            written = group_slots >= 0  # PAD, -1, means: write nothing
            cache[group_slots[written]] = tokens[written]
        sampled = []
        for b, (begin, end) in enumerate(pairwise(inputs["query_start_loc"].tolist())):
            state, last = block_tables[2][b, 0], int(inputs["positions"][end - 1])
            self.states[state] = torch.cat([self.states[state], tokens[begin:end]])[-CONV:]
            past = []
            for g, first in enumerate((0, max(last - WINDOW + 1, 0))):
                p = torch.arange(first, last + 1, device=tokens.device)
                past.append(self.caches[g][block_tables[g][b, p // BLOCK] * BLOCK + p % BLOCK])
            sampled.append(next_token(*past, self.states[state]))
        return sampled


def check(tables, requests, inputs, block_tables, slots) -> None:
    """A step's results against the scalar reference and against the blocks that requests hold."""
    tables.check_integrity()
    groups = tables.layout.groups
    rows = [{request.row: request.blocks[g] for request in requests} for g in range(len(groups))]
    tokens = [inputs[name] for name in ("idx_mapping", "query_start_loc", "positions")]
    replay = {name: inputs[name] for name in ("replay_start", "replay_len")}
    expected = reference.slot_mappings(groups, rows, *tokens, capacity=slots.shape[1], **replay)
    assert slots.tolist() == expected, "slots are not the reference's"
    for b, request in enumerate(requests):
        for g, blocks in enumerate(request.blocks):
            row = block_tables[g][b, : len(blocks)].tolist()
            assert row == blocks, f"group {g}, row {request.row}: {row}, but it holds {blocks}"
