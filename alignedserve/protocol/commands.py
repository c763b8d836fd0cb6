"""Commands: orders of a core to its shell, in the imperative. They stay within one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from alignedserve.core import (
    NOTHING_SPENT,
    FinishReason,
    FormOrder,
    Logprob,
    Opening,
    Rejection,
    Request,
    Spent,
    StepPlan,
)
from alignedserve.protocol.messages import Figures, Message

if TYPE_CHECKING:
    from alignedserve.explain.story import Story  # no core looks into it


@dataclass(slots=True)  # made for every frame, and a frozen one takes three times as long
class Send:
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Report `TimerFired(name)` at this time. A second timer of a name replaces the first."""

    name: str
    at: float


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class RunStep:
    plan: StepPlan


@dataclass(slots=True)
class RunAmid(RunStep):
    """Run a step in a pause of the step that runs, or behind that step if it ends first."""


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copy device blocks to arena pages: the KV of `tokens`, a request's first tokens, from `start` on."""

    number: int  # of the copy; CopiedOut names it
    pool: str  # holder of the pages: a successor may have given the same pages to other requests
    blocks: tuple[int, ...]  # as in core.KvForm
    pages: tuple[int, ...]
    tokens: tuple[int, ...]
    start: int = 0  # a multiple of page_size: the pages before it hold their tokens already
    aside: bool = False  # beside the steps, at a pace that does not delay them; otherwise between two steps


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Copy arena pages to device blocks: the KV of `tokens`, a request's first tokens, from `start` on."""

    number: int
    pool: str
    pages: tuple[int, ...]
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    start: int = 0  # as in CopyOut: the blocks before it hold their tokens already
    aside: bool = False  # as in CopyOut


@dataclass(frozen=True, slots=True)
class SendKv:
    """Send device blocks to the blocks of another worker: the KV of `tokens`, a request's first tokens.

    Transfers from one holder to another are numbered, and both workers are told of each, the receiver by ReceiveKv. A
    transfer begins in its turn among steps and copies, and goes on beside later work.
    """

    number: int  # rises, for each receiver
    to: str  # the holder
    blocks: tuple[int, ...]  # the core's again with KvSent; none if the KV is here no more, which the receiver hears
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReceiveKv:
    """The other end of a SendKv. In every case KvReceived follows: in the end by a time-out.

    It too begins in its turn: earlier work may still read from these blocks.
    """

    number: int
    source: str  # the holder
    blocks: tuple[int, ...]  # the core's again with KvReceived
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrepareSyntax:
    """Compile the syntax of a request beside the steps, so that none waits for it: SyntaxReady follows.

    What is compiled is kept for as long as the core keeps the request's `sampling`, this very object."""

    request: Request


@dataclass(frozen=True, slots=True)
class WatchHolder:
    """Report `HolderGone(holder)` as soon as the lock of this holder is free."""

    holder: str


@dataclass(frozen=True)
class End:
    """End the process: nothing is left for the part to do."""


class Deliver(Struct, frozen=True, array_like=True, gc=False):  # made for each token
    """Hand new tokens of a request to the client."""

    request: str
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[Logprob, ...] = ()  # as in Output
    opening: Opening | None = None
    is_infeasible: bool = False  # with the first tokens: no server could have brought them in time
    spent: Spent = NOTHING_SPENT  # so far, in all attempts


@dataclass(frozen=True, slots=True)
class Scale:
    """Have the launcher run this number of workers: it starts some or retires some. A count of None stays as it is."""

    prefill: int | None
    decode: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Show:
    """Show figures of a member in the gateway's metrics and status."""

    figures: Figures


@dataclass(frozen=True, slots=True)
class TellStory:
    """Hand the story of a request to the coroutine that asked for it."""

    number: int  # of the question
    story: Story


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell the client that the request was refused, or cannot be finished."""

    request: str
    reason: Rejection
    why: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class TellPlace:
    """Tell the client how many prompts run before its own, and in about how many seconds the first token comes."""

    request: str
    num_before: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Charge:
    """Charge what a request that ended early has used in all. More may follow: its last step may end after it."""

    request: str
    spent: Spent


# Commands that take a worker's time: it performs them one after the other.
Work: TypeAlias = RunStep | CopyOut | CopyIn | FormOrder
Transfer: TypeAlias = SendKv | ReceiveKv
Beside: TypeAlias = Transfer | PrepareSyntax  # begins in its turn, as work does; later work goes on beside it
Command: TypeAlias = (
    Work
    | Beside
    | Send
    | SetTimer
    | WatchHolder
    | End
    | Deliver
    | Show
    | Reject
    | TellPlace
    | Charge
    | TellStory
    | Scale
)
