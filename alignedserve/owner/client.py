"""The interface of an owner, as the HTTP application and the job runner use it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from alignedserve.core import NO_OPENING, NOTHING_SPENT, FinishReason, Logprob, Opening, Rejection, Request, Spent
from alignedserve.errors import AlignedServeError
from alignedserve.explain.story import Story
from alignedserve.protocol.messages import Member


class InLine(NamedTuple):
    """The place of a chat that waits in line."""

    num_before: int  # prompts that run before its own
    seconds: float  # until the first token, as predicted


@dataclass(frozen=True)
class Delivered:
    """New tokens of a request; the last delivery has a finish. A chat that waits in line is told its place first."""

    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[Logprob, ...] = ()  # of each token, where asked for
    opening: Opening = NO_OPENING  # with the first tokens
    is_infeasible: bool = False  # with the first tokens: the prompt alone takes longer than the ttft
    spent: Spent = NOTHING_SPENT  # of workers' time and energy, so far
    place: InLine | None = None  # there are no tokens yet


class Overloaded(AlignedServeError):
    """The request was not accepted; a later try may be accepted."""

    def __init__(self, why: str, retry_after_s: float, reason: Rejection = Rejection.LATE, command: str = "") -> None:
        """`command` is what tells more."""
        super().__init__(why)
        self.why, self.reason, self.command = why, reason, command
        self.retry_after_s = retry_after_s


class GivenUp(Overloaded):
    """The request was accepted, and all its attempts failed."""

    def __init__(self, why: str, retry_after_s: float, command: str = "") -> None:
        super().__init__(why, retry_after_s, Rejection.GIVEN_UP, command)


class Culprit(AlignedServeError):
    """The request ended every worker that ran it: another try only brings another death."""


class CutOff(AlignedServeError):
    """The owner ends and does not wait for the request."""


Settle: TypeAlias = Callable[[Spent], None]


def ignore(_: Spent) -> None: ...


class DeploymentClient(Protocol):
    """What an owner knows of its deployment."""

    @property
    def name(self) -> str:
        """Return the name of the member that owns requests opened here."""

    @property
    def ready(self) -> bool:
        """Return whether a request opened now could run."""

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the members of the deployment that are there."""

    @property
    def late(self) -> Mapping[str, float]:
        """Return the workers whose present step takes far longer than predicted, and for how long it has run."""

    def now(self) -> float:
        """Return the time by the clock of `Request.arrival_at`."""

    async def story(self, request: str) -> Story:
        """Return what the parts of the deployment remember of a request."""


class OwnerClient(DeploymentClient, Protocol):
    @property
    def lacks_s(self) -> float:
        """Return for how long no request could run: 0 if one can run now, infinite if none ever could."""

    def pause(self, request: str) -> None:
        """Stop the request until `resume`, since the client does not read; then the request goes on as before."""

    def resume(self, request: str) -> None:
        """Have a request that was paused run again."""

    def has_unread(self, request: str) -> bool:
        """Return whether a delivery has come that was not read from `open`."""

    def end(self, request: str, error: AlignedServeError) -> None:
        """Raise the error where the request's deliveries are awaited, which cancels the request everywhere."""

    def open(self, request: Request, settle: Settle = ignore) -> AsyncGenerator[Delivered, None]:
        """Yield the request's deliveries; the last has a finish. `settle` is told what a request that ends before that
        has used in all: soon after its end, and once more if a worker tells of a later step.

        If the generator is closed before that, or the task that waits for the next delivery is cancelled, the request
        is cancelled everywhere. Raises Overloaded before the first delivery if the request is not accepted.
        """
