"""A step that was begun, and its tokens on their way from the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from alignedserve.core import StepResult
from alignedserve.engine.device.devices import Mark, ReadBack
from alignedserve.engine.sampling.sampling import Drawn
from alignedserve.engine.sampling.step_result import told
from alignedserve.kernels.common.drawing import Likeliest


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


class Passing:
    """One that brings no token, as a chunk in the middle of a prompt. It has ended when the device is through: only
    then may its KV be copied."""

    has_failed = False

    def __init__(self, number: int, device: torch.device) -> None:
        self._number, self._ordered = number, Mark(device)

    def result(self) -> StepResult:
        self._ordered.wait()
        return StepResult(self._number, ())


class Reading:
    """One whose tokens were drawn on the device. They are copied as soon as they are there, whatever the device has in
    line by then."""

    has_failed = False

    def __init__(self, number: int, requests: Sequence[str], drawn: Drawn) -> None:
        self._number, self._requests, self._drawn = number, requests, drawn
        self._tokens = ReadBack(drawn.tokens)
        self._likeliest = [ReadBack(part) for part in drawn.likeliest or ()]

    def result(self) -> StepResult:
        likeliest = Likeliest(*(part.read() for part in self._likeliest)) if self._likeliest else None
        drawn = replace(self._drawn, tokens=self._tokens.read(), likeliest=likeliest)
        return told(self._number, self._requests, drawn.read())
