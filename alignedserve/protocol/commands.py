"""What a core has its shell do: orders, in the imperative. They stay within one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from alignedserve.core import CacheKind, FinishReason, Logprob, Sketch, StepPlan
from alignedserve.protocol.messages import Figures, Message


@dataclass(slots=True)  # made for every frame, and a frozen one takes three times as long
class Send:
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class SetTimer:
    """`TimerFired(name)` at this time; a second timer of a name replaces the first."""

    name: str
    at: float


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class RunStep:
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Device blocks to arena pages: the KV of `tokens`, which are a request's first ones, from `start` on."""

    number: int  # which CopiedOut will name
    pool: str  # the holder whose pages these are: its successor may have given them to somebody else
    pairs: tuple[int, ...]
    pages: tuple[int, ...]
    tokens: tuple[int, ...]
    start: int = 0  # the pages before it hold theirs already; a multiple of page_size
    from_right: tuple[int, ...] = ()  # those of the pairs that are filled from their right end
    saved: tuple[tuple[int, int], ...] = ()  # (token, place): these have no slot, but a place of CopySlots
    aside: bool = False  # beside the steps, at a pace that does not delay them; otherwise between two steps


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Arena pages to device blocks."""

    number: int
    pool: str
    pages: tuple[int, ...]
    pairs: tuple[int, ...]
    tokens: tuple[int, ...]
    kind: CacheKind = CacheKind.KV  # to be there; of hidden pages K and V are made where it is KV
    from_right: tuple[int, ...] = ()  # as in CopyOut
    aside: bool = False  # as in CopyOut


@dataclass(frozen=True, slots=True)
class SendKv:
    """Device blocks to those of another worker: the KV of `tokens`, which are a request's first.

    Transfers from one holder to another are numbered, and both are told of each; the other one by ReceiveKv. It is
    begun in its turn among steps and copies, and goes on beside those that come after it.
    """

    number: int  # rises, for each receiver
    to: str  # the holder
    pairs: tuple[int, ...]  # the core's again with KvSent; none where the KV is here no more: the receiver hears that
    tokens: tuple[int, ...]
    kind: CacheKind = CacheKind.KV


@dataclass(frozen=True, slots=True)
class ReceiveKv:
    """The other end of a SendKv. In every case KvReceived follows: in the end by a time-out.

    It too is begun in its turn: what was ordered before it may still read from these blocks.
    """

    number: int
    source: str  # the holder
    pairs: tuple[int, ...]  # the core's again with KvReceived
    tokens: tuple[int, ...]
    kind: CacheKind = CacheKind.KV


@dataclass(frozen=True, slots=True)
class CopySlots:
    """K and V of single tokens, in all layers, before what is ordered next. All are read before any is written.

    A slot is pair * block_size + offset; a place is a token's in the worker's own memory, which nobody else reads.
    """

    checkpoints: tuple[tuple[int, int], ...] = ()  # (slot, place)
    restores: tuple[tuple[int, int], ...] = ()  # (place, slot)
    moves: tuple[tuple[int, int], ...] = ()  # (slot, slot)


@dataclass(frozen=True, slots=True)
class ProjectKv:
    """Of a request's first tokens, K and V to pairs, made of the hidden vectors in its blocks, before what is ordered
    next. The pairs may be of the very same blocks."""

    request: str
    blocks: tuple[int, ...]
    pairs: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CompressPage:
    """One page of an order to compress, to another."""

    number: int  # of the order
    pool: str
    page: int
    into: int


@dataclass(frozen=True, slots=True)
class WatchHolder:
    """`HolderGone(holder)` as soon as its lock is free."""

    holder: str


@dataclass(frozen=True)
class End:
    """The part ends by itself: nothing is left for it to do."""


@dataclass(slots=True)
class Deliver:
    """New tokens of a request, to its client."""

    request: str
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[Logprob, ...] = ()  # as in Output
    prompt_logprobs: tuple[Logprob, ...] = ()
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Predict:
    """How long will this output be? `Predicted` answers, later, or never where the side process is lost."""

    request: str
    attempt: int
    sketch: Sketch
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Learn:
    """An output has ended after so many tokens: later ones are predicted by it."""

    sketch: Sketch
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Retrain:
    """Fit anew to all that was learnt, beside the predictions, and keep what was learnt over a restart."""


@dataclass(frozen=True, slots=True)
class Scale:
    """So many workers, of the launcher: it starts others or has some go. None of a count: as it is."""

    prefill: int | None
    decode: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Show:
    """To whoever watches the gateway."""

    figures: Figures


@dataclass(frozen=True, slots=True)
class Reject:
    """To the client: the request was refused, or cannot be finished."""

    request: str
    why: str
    retry_after_s: float
    is_given_up: bool = False  # it was tried, and would fare no better now


# What takes a worker's time: one after the other.
Work: TypeAlias = RunStep | CopyOut | CopyIn | CopySlots | ProjectKv | CompressPage
Transfer: TypeAlias = SendKv | ReceiveKv  # begun like work, and then beside it
Command: TypeAlias = (
    Work | Transfer | Send | SetTimer | WatchHolder | End | Deliver | Show | Reject | Predict | Learn | Retrain | Scale
)
