"""What a step brings: from its logits to tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from alignedserve.core import Chunk, Decode, Logprob, StepPlan, StepResult
from alignedserve.engine.sampling.sampling import Chosen, Sampler, Wanted
from alignedserve.errors import PlanError


def rows_wanted(plan: StepPlan, starts: Sequence[int]) -> list[int]:
    """The tokens of the step whose logits `result_of` needs; those of the plan's part i lie from starts[i] on.

    The last of each part that samples, then all of each chunk that are followed by one that is to be scored.
    """
    parts = zip(plan.parts, starts, strict=True)
    last = [start + _num_tokens(part) - 1 for part, start in parts if part.sampling is not None]
    scored = [
        row
        for chunk, start in zip(plan.chunks, starts, strict=False)
        for row in range(start, start + _num_scored(chunk))
    ]
    return last + scored


def _num_tokens(part: Chunk | Decode) -> int:
    return len(part.tokens) if isinstance(part, Chunk) else 1


def _num_scored(chunk: Chunk) -> int:
    count = len(chunk.scoring.tokens) if chunk.scoring is not None else 0
    if count > len(chunk.tokens):
        raise PlanError(f"request {chunk.request} is to have {count} tokens scored after {len(chunk.tokens)}")
    return count


def wanted_of(plan: StepPlan, inputs: Mapping[str, int]) -> list[Wanted]:
    """The tokens that the step samples; `inputs` names the last token of each part."""
    return [
        Wanted(part.sampling, part.index, part.request, part.history, inputs[part.request] if part.index else None)
        for part in plan.parts
        if part.sampling is not None
    ]


def result_of(plan: StepPlan, logits: torch.Tensor, sampler: Sampler, wanted: Sequence[Wanted]) -> StepResult:
    """From the logits of `rows_wanted`, which are changed on the way."""
    chosen = sampler.sample(logits[: len(wanted)], wanted) if wanted else []
    scores = tuple(_scores(plan.chunks, logits[len(wanted) :], sampler))
    return told(plan.number, [one.request for one in wanted], chosen, scores)


def told(
    number: int,
    requests: Sequence[str],
    chosen: Sequence[Chosen],
    scores: tuple[tuple[str, tuple[Logprob, ...]], ...] = (),
) -> StepResult:
    """Of what was chosen for each of these."""
    both = [*zip(requests, chosen, strict=True)]
    return StepResult(
        number,
        tuple((request, one.token) for request, one in both if one.token is not None),
        tuple(request for request, one in both if one.token is None),
        tuple((request, one.logprob) for request, one in both if one.logprob is not None),
        scores,
    )


def _scores(
    chunks: Sequence[Chunk], logits: torch.Tensor, sampler: Sampler
) -> Iterator[tuple[str, tuple[Logprob, ...]]]:
    """Of each chunk that is scored; their logits lie one chunk after the other."""
    start = 0
    for chunk in chunks:
        if chunk.scoring is not None:
            tokens, end = chunk.scoring.tokens, start + len(chunk.scoring.tokens)
            yield chunk.request, tuple(sampler.score(logits[start:end], tokens, chunk.scoring.top))
            start = end
