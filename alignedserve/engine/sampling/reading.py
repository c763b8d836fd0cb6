"""Steps that were begun, how the engine waits for their results, and how these are made of logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from alignedserve.core import Chunk, Decode, Logprob, StepPlan, StepResult
from alignedserve.engine.device.devices import Mark, ReadBack
from alignedserve.engine.sampling.sampling import Drawn, NextToken, SampledToken, Sampler
from alignedserve.errors import PlanError
from alignedserve.kernels.common.drawing import Likeliest
from alignedserve.kernels.common.placing import on_device


class Begun(Protocol):
    @property
    def has_failed(self) -> bool:
        """Return whether the step failed before it ran, because memory was too little."""

    def result(self) -> StepResult:
        """Wait for the step's result and return it."""


@dataclass(frozen=True)
class Done:
    """A step whose result is here already."""

    done: StepResult

    @property
    def has_failed(self) -> bool:
        return self.done.failure is not None

    def result(self) -> StepResult:
        return self.done


class Passing:
    """A step that samples no token, such as a chunk in the middle of a prompt.

    It ends when the device has run it: only then may its KV be copied."""

    has_failed = False

    def __init__(self, number: int, device: torch.device) -> None:
        self._number, self._ordered = number, Mark(device)

    def result(self) -> StepResult:
        self._ordered.wait()
        return StepResult(self._number, ())


class DrawnStep:
    """A step whose tokens are drawn on the device; they are copied as soon as they are drawn, ahead of later work."""

    has_failed = False

    def __init__(self, number: int, requests: Sequence[str], drawn: Drawn) -> None:
        self._number, self._requests, self._drawn = number, requests, drawn
        self._tokens = ReadBack(drawn.tokens)
        self._likeliest = [ReadBack(part) for part in drawn.likeliest or ()]

    def result(self) -> StepResult:
        likeliest = Likeliest(*(part.read() for part in self._likeliest)) if self._likeliest else None
        drawn = replace(self._drawn, tokens=self._tokens.read(), likeliest=likeliest)
        return make_result(self._number, self._requests, drawn.read())


def rows_wanted(plan: StepPlan, starts: Sequence[int]) -> list[int]:
    """Return the rows of the step whose logits `result_of` needs; the tokens of the plan's part i begin at starts[i].

    They are the last row of each part that samples, then all rows of each chunk before a token that must be scored.
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
        raise PlanError(f"request {chunk.request}: {count} tokens cannot be scored after {len(chunk.tokens)}")
    return count


def next_tokens(plan: StepPlan, inputs: Mapping[str, int]) -> list[NextToken]:
    """Return the tokens that the step samples, draws last; `inputs` has the last input token of each request."""
    return [
        NextToken(part.sampling, part.index, part.request, part.history, inputs[part.request] if part.index else None)
        for part in (*plan.parts, *plan.draws)
        if part.sampling is not None
    ]


def with_draws(plan: StepPlan, logits: torch.Tensor, wanted: Sequence[NextToken]) -> torch.Tensor:
    """Return the logits of `rows_wanted` with a row for each draw, behind those of the parts that sample."""
    row_of = {token.request: row for row, token in enumerate(wanted)}
    rows, num_parts = [*range(len(logits))], len(wanted) - len(plan.draws)
    rows[num_parts:num_parts] = [row_of[draw.source] for draw in plan.draws]
    return logits.index_select(0, on_device(torch.tensor(rows), logits.device))


def result_of(plan: StepPlan, logits: torch.Tensor, sampler: Sampler, wanted: Sequence[NextToken]) -> StepResult:
    """Return the step's result from the logits of `rows_wanted`; this changes the logits."""
    sampled = sampler.sample(logits[: len(wanted)], wanted) if wanted else []
    scores = tuple(_scores(plan.chunks, logits[len(wanted) :], sampler))
    return make_result(plan.number, [token.request for token in wanted], sampled, scores)


def make_result(
    number: int,
    requests: Sequence[str],
    sampled: Sequence[SampledToken],
    scores: tuple[tuple[str, tuple[Logprob, ...]], ...] = (),
) -> StepResult:
    """Return the result of a step with the token that was sampled for each request."""
    by_request = [*zip(requests, sampled, strict=True)]
    return StepResult(
        number,
        tuple((request, sample.token) for request, sample in by_request if sample.token is not None),
        tuple(request for request, sample in by_request if sample.token is None),
        tuple((request, sample.logprob) for request, sample in by_request if sample.logprob is not None),
        scores,
        masks=tuple((request, sample.mask_s) for request, sample in by_request if sample.mask_s),
    )


def _scores(
    chunks: Sequence[Chunk], logits: torch.Tensor, sampler: Sampler
) -> Iterator[tuple[str, tuple[Logprob, ...]]]:
    """Yield the scores of each chunk that has any; the chunks' logits lie one after the other."""
    start = 0
    for chunk in chunks:
        if chunk.scoring is not None:
            tokens, end = chunk.scoring.tokens, start + len(chunk.scoring.tokens)
            yield chunk.request, tuple(sampler.score(logits[start:end], tokens, chunk.scoring.top))
            start = end
