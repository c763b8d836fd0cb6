"""Steps that were begun, and how the engine waits for their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from alignedserve.core import StepResult
from alignedserve.engine.device.devices import Mark, ReadBack
from alignedserve.engine.sampling.sampling import Drawn
from alignedserve.engine.sampling.step_result import make_result
from alignedserve.kernels.common.drawing import Likeliest


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
