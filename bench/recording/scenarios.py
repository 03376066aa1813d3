"""What to record: model shapes, pool sizes and request traffic, each with its seed.

A scenario says which events it exists for (`must_happen`); a recording without them is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from fused_slots.faults import BlockTableError


class RecordingError(BlockTableError):
    """vLLM cannot be recorded, or the recording is not what the scenario promises."""


@dataclass(frozen=True)
class Layers:
    """Layers of one kind in the hybrid model; vLLM decides which of them share a block table.

    Args:
        kind: "full", "sliding", "mamba" or "ring".
        num_layers: how many layers the model has of this kind.
        num_kv_heads: half the heads make a page of twice the tokens.
        window: tokens of a sliding window.
        ring_size: tokens of a ring.
    """

    kind: str
    num_layers: int
    num_kv_heads: int = 8
    window: int = 0
    ring_size: int = 0


@dataclass(frozen=True)
class Scenario:
    """One recording: the model, the engine's limits, the traffic.

    Args:
        num_steps: steps to record; the traffic never runs dry before.
        block_size: tokens of a full attention block.
        num_blocks: allocation blocks of the pool, the null block included.
        prompt_tokens, output_tokens: shortest and longest; lengths are log-uniform.
        arrivals_per_step: mean of a Poisson process, after a burst that fills half the rows.
        prefix_caching: Mamba layers then run in vLLM's "align" cache mode, otherwise in "none".
        shared_prefixes: tokens of each prompt prefix that many requests share.
        asynchronous: AsyncScheduler, two batches in flight.
        draft_tokens: speculated per decode step; each is accepted with probability 0.6.
        abort_every: steps between two client aborts, 0 = never.
        must_happen: counts of the recording's metadata that must not be 0.
    """

    name: str
    description: str
    seed: int
    num_steps: int
    layers: tuple[Layers, ...]
    block_size: int
    num_blocks: int
    max_num_reqs: int
    max_num_batched_tokens: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    arrivals_per_step: float
    max_model_len: int = 4096
    prefix_caching: bool = False
    shared_prefixes: tuple[int, ...] = ()
    asynchronous: bool = False
    draft_tokens: int = 0
    abort_every: int = 0
    must_happen: tuple[str, ...] = ()


_HYBRID = (
    Layers("full", 4),
    Layers("sliding", 4, window=512),
    Layers("mamba", 8),
)

SCENARIOS = (
    Scenario(
        name="chunked_prefill",
        description="Long prompts cut into chunks that share the batch with decodes; full "
        "attention, sliding window and Mamba state (cache mode none).",
        seed=1,
        num_steps=400,
        layers=_HYBRID,
        block_size=16,
        num_blocks=9000,
        max_num_reqs=24,
        max_num_batched_tokens=1024,
        prompt_tokens=(200, 3000),
        output_tokens=(20, 200),
        arrivals_per_step=0.4,
        must_happen=("chunked_prefills", "requests_finished"),
    ),
    Scenario(
        name="prefix_hits",
        description="System prompts and follow-up turns found in the prefix cache; sliding layers "
        "with half the heads get blocks of twice the size; Mamba in cache mode align.",
        seed=2,
        num_steps=400,
        layers=(
            Layers("full", 4),
            Layers("sliding", 4, num_kv_heads=4, window=1024),
            Layers("mamba", 8),
        ),
        block_size=64,
        num_blocks=3000,
        max_num_reqs=32,
        max_num_batched_tokens=2048,
        prompt_tokens=(20, 1500),
        output_tokens=(10, 150),
        arrivals_per_step=0.6,
        prefix_caching=True,
        shared_prefixes=(320, 1000, 1984),
        must_happen=("prefix_hits", "requests_finished"),
    ),
    Scenario(
        name="preemption",
        description="A pool too small for its requests: they are preempted and come back as new "
        "ones with all their blocks.",
        seed=3,
        num_steps=400,
        layers=_HYBRID,
        block_size=16,
        num_blocks=900,
        max_num_reqs=32,
        max_num_batched_tokens=1024,
        prompt_tokens=(20, 600),
        output_tokens=(50, 400),
        arrivals_per_step=0.4,
        max_model_len=2048,
        must_happen=("preemptions", "resumptions", "requests_finished"),
    ),
    Scenario(
        name="async_scheduling",
        description="Two batches in flight, prefix caching, preemption and client aborts.",
        seed=4,
        num_steps=400,
        layers=_HYBRID,
        block_size=32,
        num_blocks=700,
        max_num_reqs=40,
        max_num_batched_tokens=2048,
        prompt_tokens=(20, 1200),
        output_tokens=(20, 300),
        arrivals_per_step=0.5,
        max_model_len=3072,
        prefix_caching=True,
        shared_prefixes=(256, 800),
        asynchronous=True,
        abort_every=25,
        must_happen=("preemptions", "resumptions", "prefix_hits", "aborts", "chunked_prefills"),
    ),
    Scenario(
        name="many_groups_small_blocks",
        description="Twelve groups of small blocks, among them a ring of one block per request.",
        seed=5,
        num_steps=400,
        layers=(
            Layers("full", 2),
            Layers("sliding", 8, window=64),
            Layers("sliding", 4, num_kv_heads=4, window=250),
            Layers("mamba", 8),
            Layers("ring", 2, ring_size=4),
        ),
        block_size=4,
        num_blocks=6000,
        max_num_reqs=48,
        max_num_batched_tokens=512,
        prompt_tokens=(5, 400),
        output_tokens=(5, 200),
        arrivals_per_step=0.7,
        max_model_len=1024,
        must_happen=("chunked_prefills", "requests_finished"),
    ),
    Scenario(
        name="speculative",
        description="Three draft tokens a step, some rejected, so positions step back; preemption.",
        seed=6,
        num_steps=400,
        layers=_HYBRID,
        block_size=16,
        num_blocks=1000,
        max_num_reqs=24,
        max_num_batched_tokens=1024,
        prompt_tokens=(20, 1000),
        output_tokens=(50, 400),
        arrivals_per_step=0.4,
        max_model_len=2048,
        draft_tokens=3,
        must_happen=("drafts_rejected", "drafts_accepted", "preemptions", "resumptions"),
    ),
    Scenario(
        name="async_speculative",
        description="Draft tokens with two batches in flight: the scheduler runs ahead of the "
        "positions that the runner computes after rejections; prefix caching.",
        seed=7,
        num_steps=400,
        layers=_HYBRID,
        block_size=32,
        num_blocks=1000,
        max_num_reqs=32,
        max_num_batched_tokens=1536,
        prompt_tokens=(20, 1200),
        output_tokens=(50, 400),
        arrivals_per_step=0.5,
        max_model_len=3072,
        prefix_caching=True,
        shared_prefixes=(512,),
        asynchronous=True,
        draft_tokens=3,
        must_happen=("drafts_rejected", "drafts_accepted", "prefix_hits", "preemptions"),
    ),
)
