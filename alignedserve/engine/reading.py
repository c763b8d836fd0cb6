"""A step that was begun, and its tokens on their way from the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from alignedserve.core import StepPlan, StepResult
from alignedserve.engine.devices import ReadBack
from alignedserve.engine.inputs import Unread
from alignedserve.engine.sampling import Wanted


class Begun(Protocol):
    @property
    def has_failed(self) -> bool:
        """Before it ran, for want of memory."""

    def result(self) -> StepResult:
        """Waits for it."""


@dataclass(frozen=True)
class Done:
    """One that nobody has to wait for."""

    done: StepResult

    @property
    def has_failed(self) -> bool:
        return self.done.failure is not None

    def result(self) -> StepResult:
        return self.done


class Reading:
    """One whose tokens are likeliest ones, chosen on the device. They are copied as soon as they are there, whatever
    the device has in line by then."""

    has_failed = False

    def __init__(self, plan: StepPlan, wanted: Sequence[Wanted], tokens: torch.Tensor) -> None:
        """`tokens` less than 0: none can be sampled."""
        self._number, self._requests = plan.number, [one.request for one in wanted]
        self.unread = Unread(tokens, {request: row for row, request in enumerate(self._requests)})
        self._coming = ReadBack(tokens)

    def result(self) -> StepResult:
        both = [*zip(self._requests, self._coming.read().tolist(), strict=True)]
        return StepResult(
            self._number,
            tuple((request, token) for request, token in both if token >= 0),
            tuple(request for request, token in both if token < 0),
        )


def is_greedy(plan: StepPlan, wanted: Sequence[Wanted]) -> bool:
    """Whether the likeliest tokens are all that is asked for, of logits as they are."""
    samplings = [one.sampling for one in wanted]
    plain = all(one.temperature == 0 and one.logprobs is None and not one.edits_logits for one in samplings)
    return plain and bool(wanted) and not any(chunk.scoring for chunk in plan.chunks)
