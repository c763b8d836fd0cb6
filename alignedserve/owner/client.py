"""What the HTTP application and the job runner need of the owner of its requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from alignedserve.core import FinishReason, Logprob, Request
from alignedserve.errors import AlignedServeError
from alignedserve.protocol.messages import Member


@dataclass(frozen=True)
class Delivered:
    """New tokens of a request; nothing follows the one that has a finish."""

    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[Logprob, ...] = ()  # one for each token, where the request asks for them
    prompt_logprobs: tuple[Logprob, ...] = ()  # with the first tokens, where it asks for them
    num_cached: int = 0  # with the first tokens: those of the prompt that the pool had


class Overloaded(AlignedServeError):
    """The request was not accepted; a later try may be."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.why = why
        self.retry_after_s = retry_after_s


class GivenUp(Overloaded):
    """It was accepted, and nothing came of all its attempts."""


class CutOff(AlignedServeError):
    """Its owner ends, and did not wait for it."""


class OwnerClient(Protocol):
    @property
    def name(self) -> str:
        """The member that owns what is opened here."""

    @property
    def ready(self) -> bool:
        """Whether a request opened now could run."""

    @property
    def lacks_s(self) -> float:
        """For how long none could have; 0 where it could, and without end where none ever could."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The parts of the deployment that are there."""

    def now(self) -> float:
        """The clock of `Request.arrival_at`."""

    def open(self, request: Request) -> AsyncGenerator[Delivered, None]:
        """The request's deliveries, the last of which has a finish.

        Closing it before that, or cancelling the task that waits for its next delivery, cancels the
        request everywhere. Raises Overloaded, before the first delivery, where it is not accepted.
        """
