"""Choose the prompt tokens of a step where prompts are served first come, first served; and make a chunk."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.core import CacheKind, Chunk
from alignedserve.worker.step.running import Running


def cut(prompts: Iterable[Running], budget: int) -> tuple[Chunk, ...]:
    """Return chunks of at most `budget` tokens together; only the last prompt of a step is cut short. A prompt that
    runs whole and is longer than what is left of the budget runs in the next step, as the first of it."""
    chunks: list[Chunk] = []
    for prompt in prompts:
        if budget <= 0 or (chunks and prompt.request.runs_whole and prompt.num_ahead > budget):
            break
        chunk = chunk_of(prompt, budget)
        budget -= len(chunk.tokens)
        chunks.append(chunk)
    return tuple(chunks)


def whole(prompts: Iterable[Running], budget: int) -> tuple[Chunk, ...]:
    """Return as many whole prompts as fit; only a prompt that is longer than the budget by itself is cut."""
    chunks: list[Chunk] = []
    for prompt in prompts:
        if chunks and prompt.num_ahead > budget:
            break
        chunks.append(chunk_of(prompt, budget))
        budget -= len(chunks[-1].tokens)
    return tuple(chunks)


def chunk_of(prompt: Running, most: int) -> Chunk:
    """Return the next chunk of a prompt, of at most so many tokens, or all of a prompt that runs whole."""
    request = prompt.request
    size = prompt.num_ahead if request.runs_whole else min(prompt.most_in_chunk, most)
    whole = size == prompt.num_ahead
    return Chunk(
        request=request.id,
        tokens=prompt.tokens(prompt.prefix, prompt.prefix + size),
        start=prompt.prefix,
        pairs=() if prompt.blocks else prompt.pairs,
        sampling=request.sampling if whole and prompt.has_tokens else None,
        index=len(prompt.output),
        history=prompt.history if whole else None,
        scoring=prompt.scoring(prompt.prefix + size),
        from_right=prompt.from_right,
        dropped=prompt.dropped,
        kind=CacheKind.HIDDEN if prompt.blocks else CacheKind.KV,
        blocks=prompt.blocks,
        pooling=request.pooling if whole else None,
        adapter=prompt.request.adapter,
    )
