"""What the parts say to each other.

Facts are in the past tense, orders in the imperative. Messages travel as wire frames (wire.py); KV data never does: a
message carries page and block numbers. What a core hears from its shell, and tells it, is in events.py and commands.py.

    owner ── Submit, Cancel, Declare ─▶ router ── Prefill ─▶ prefill worker ── Commit ─▶ pool
      ▲                                   │ ▲                                             │
      │ Refused, AttemptLost ◀────────────┘ └── Progress ── workers                     Batch
      └── Tokens ◀──────── prefill and decode workers ◀───────────────────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from alignedserve.core import (
    Entry,
    Estimate,
    FinishReason,
    Logprob,
    Request,
    Role,
    ServiceClass,
    Sketch,
    Usage,
)
from alignedserve.cost.model import Coefficients
from alignedserve.scheduling.slo import StepTimes

# --- Membership: every part registers with the router and hears of the others from it.


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    role: Role
    node: str
    incarnation: int  # the process's life: a later start has a larger one
    address: str
    transport: str = ""  # where peers agree with it how KV goes directly, of each rank; empty: it does not

    @property
    def holder(self) -> str:
        """Of leases and locks: a later life of the same member is another holder."""
        return holder(self.name, self.incarnation)


def rank_suffix(rank: int) -> str:
    """Of the name of a worker, where others share its model: rank 0 is the worker to everybody else."""
    return f"-rank-{rank}" if rank else ""


def rank_of(part: str) -> int:
    """By its name."""
    return int(part.partition("-rank-")[2] or 0)


def holder(name: str, incarnation: int) -> str:
    return f"{name}.{incarnation}"


@dataclass(frozen=True, slots=True)
class Members:
    """From the router, at every change: who is there now of those that the receiver has to do with, itself included."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """To the router, from a thread of its own: a worker in a long step is not dead.

    It says all that there is to know of its sender, so the first one registers it, and a router
    that has just started knows everybody after one interval.
    """

    member: Member


@dataclass(frozen=True, slots=True)
class Died:
    """From a launcher, which saw the process end."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Retire:
    """From a launcher to the router, and on to the worker: it gets nothing new, and ends when nothing is left there."""

    name: str
    incarnation: int


# --- A request's road.


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request
    sketch: Sketch | None = None  # None where nobody is to predict its length


@dataclass(frozen=True, slots=True)
class Cancel:
    """From the owner or the router: drop the request, up to this attempt."""

    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Refused:
    """From the router: the request was not accepted."""

    request: str
    attempt: int
    why: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """From the router to the owner, which starts the next attempt."""

    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """From the router to a worker: run the prompt."""

    request: Request
    decode: str = ""  # the decode worker with most room: who cannot wait in the pool goes there


@dataclass(frozen=True, slots=True)
class Expect:
    """From the router to where a request is: so long will its output be. Who has handed it on hands this on too."""

    request: str
    attempt: int
    estimate: Estimate


@dataclass(slots=True)  # one for each token, as is Deliver: a frozen one takes three times as long to make
class Output:
    """Some tokens of one request, the first at `index` of its whole output."""

    request: str
    attempt: int
    index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[Logprob, ...] = ()  # one for each token where the request asks for them
    prompt_logprobs: tuple[Logprob, ...] = ()  # with the token at index 0, where it asks for them
    num_cached: int = 0  # tokens of its prompt whose KV came from the pool: with the token at index 0


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class Tokens:
    """From a worker to an owner: what one step emitted for its requests."""

    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Resend:
    """From an owner that missed something: the output from `index` on."""

    request: str
    attempt: int
    index: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """From an owner that has the whole output: the worker may forget it."""

    requests: tuple[str, ...]


Attempt: TypeAlias = tuple[str, int]  # (request, attempt)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Prompts that a worker has before it, as its cost model tells; nothing where it knows nothing."""

    prompts_s: float = 0.0
    prompt_token_s: float = 0.0  # what a token more of them takes
    rt_prompts_s: float = 0.0  # of real-time requests alone


@dataclass(frozen=True, slots=True)
class Progress:
    """From a worker or pool to the router: attempts that have come a stage further."""

    committed: tuple[Attempt, ...] = ()  # the pool has their KV
    joined: tuple[Attempt, ...] = ()  # they run on the sending decode worker
    ended: tuple[Attempt, ...] = ()
    lengths: tuple[int, ...] = ()  # of the outputs of those that ended, earlier attempts included
    lost: tuple[Attempt, ...] = ()  # their KV could not be had: the owner is to start the next attempt
    unknown: tuple[Attempt, ...] = ()  # the router inquired after them, and they are not here
    returned: tuple[Attempt, ...] = ()  # from the sending decode worker to the pool
    free_pairs: int = 0
    backlog: Backlog = Backlog()


@dataclass(frozen=True, slots=True)
class Report:
    """From a decode worker to the router, every few steps and when there are none: the last one counts."""

    num_running: int = 0  # requests whose KV is on its device
    band: tuple[int, int] | None = None  # the shortest and the longest prefix of the batch that runs
    free_pairs: int = 0
    batch: int = 0  # most requests of its next step
    times: StepTimes = StepTimes()  # noqa: RUF009  (frozen)  what its steps take
    num_requests: int = 0  # candidate requests: they join before any batch
    num_batch: int = 0  # of the candidate batch, that have not joined
    num_buffered: int = 0  # of both, whose KV is on a prefill worker's device
    num_rt: int = 0  # real-time requests among those that run
    num_late: int = 0  # of them, those whose next token is late


@dataclass(frozen=True, slots=True)
class Declare:
    """From an owner to a router that has just started: all requests that are open, some in each frame."""

    requests: tuple[Request, ...]
    is_last: bool = True  # it has no others


@dataclass(frozen=True, slots=True)
class Holding:
    """From a worker or pool to a router that has just started, or missed something: the attempts it holds."""

    attempts: tuple[Attempt, ...]
    free_pairs: int = 0
    is_retiring: bool = False  # a worker that takes nothing new


# --- What puts right what a lost frame, or one that was lost with its receiver, has left behind.


@dataclass(frozen=True, slots=True)
class Inquire:
    """Are these still there? From an owner to the router, and from there to where it placed them.

    The router answers AttemptLost for what it does not know, others answer with Progress(unknown); a decode
    worker answers the pool with Release.
    """

    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Missed:
    """Frames of yours did not arrive: say again what I must know."""


# --- The pool.


SPARE = ServiceClass.BE  # of spare pages, whoever uses them: so they are none of the reserve


@dataclass(frozen=True, slots=True)
class AskPages:
    """From a worker: a lease of so many free pages to write to, in place of all that it has but the kept ones.

    So each ask puts right what a lost frame left behind. It takes the place of the ask before it. Each class has its
    own leases, asks and numbers: who waits for best-effort pages is in nobody's way who asks for real-time ones.
    """

    pages: int
    number: int = 0  # of the ask
    kept: tuple[int, ...] = ()
    service: ServiceClass = ServiceClass.RT  # whose KV is to be written there
    most: int = 0  # where this is more: up to so many, as far as there are
    is_spare: bool = False  # to have at hand: as many as are free when nobody waits, until the pool says GiveBack


@dataclass(frozen=True, slots=True)
class LeasePages:
    """From the pool: these are the worker's until it commits them, asks without keeping them, or is gone."""

    pages: tuple[int, ...]
    number: int = 0  # of the ask that this answers
    service: ServiceClass = ServiceClass.RT
    wait_s: float | None = None  # from a commit until the first decode is through, but for the copy; None: nobody is
    # pinned, however long that is
    step_s: float = 0.0  # what a decode step takes, on average


@dataclass(frozen=True, slots=True)
class GiveBack:
    """From the pool: somebody waits for pages. The receiver asks for none, keeping those it writes to, then anew."""


@dataclass(frozen=True, slots=True)
class AskPrefix:
    """From a prefill worker: hold for this attempt what there is of its beginning, page by page of these names."""

    request: str
    attempt: int
    names: tuple[int, ...]
    service: ServiceClass = ServiceClass.RT


@dataclass(frozen=True, slots=True)
class Prefix:
    """The pool's answer: these pages hold the first tokens. They stay until a Commit has them, or a Release; or until
    the pool takes them back, for somebody who waits for pages, and says so with another answer that names none."""

    request: str
    attempt: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spoiled:
    """From a worker: these pages did not hold what their names say. Nobody is to get them any more."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compress:
    """From the pool: write what these full pages of KV hold to those pages, as int8, when nothing else is due.

    A worker has one such order at a time, and its pages are leased to it until it has answered. A later order has a
    larger number; one that comes again asks for the answer again.
    """

    number: int
    pages: tuple[int, ...]
    into: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compressed:
    """The answer: of which pages that was possible. The others were not what they should be, or cannot be int8."""

    number: int
    done: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """From a worker: the entry's pages are written; the pool owns them now. First come those that it keeps already.

    From a decode worker: the request has to leave, and waits again.
    """

    entry: Entry
    num_known: int = 0  # full pages that the pool keeps: of the Prefix, or of the entry as it was handed out
    to: str = ""  # the decode worker that is to get it, where it cannot wait for a batch
    is_there: bool = False  # its KV goes there without the pool, which keeps it too


@dataclass(frozen=True, slots=True)
class Offer:
    """From a prefill worker to a decode worker that it can send KV to: its prompt is through, and its KV lies here.

    It is said again until the receiver answers: with Pull as soon as it has room for it, or with Decline.
    """

    entry: Entry  # without pages
    is_pinned: bool = False  # it cannot wait in the pool: to be taken whatever room there is
    has_pool: bool = True  # where it lies; else it waits there for its turn, and is not to be declined


@dataclass(frozen=True, slots=True)
class Decline:
    """From a decode worker: no room, or its KV did not come. The prefill worker hands it to the pool."""

    request: str
    attempt: int
    is_failed: bool = False  # it was pulled, and did not come


@dataclass(frozen=True, slots=True)
class Pull:
    """From a decode worker, which waits for it (ReceiveKv): send the KV of an attempt that you offered."""

    number: int  # of the transfer; they rise between two lives of workers, in each direction
    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """From a decode worker to a prefill worker that can send it KV: these will join, in this order.

    Their KV is copied from the pool's pages, as far as there is room, and lies there until it is pulled, or Cancel
    says that nobody wants it. The pool keeps it, too.
    """

    entries: tuple[Entry, ...]
    waits_s: tuple[float, ...]  # of each, until it joins, as far as can be expected


@dataclass(frozen=True, slots=True)
class Evict:
    """From a decode worker to a prefill worker: this one has to leave its device.

    Who has room for its KV pulls it (Pull, with a number of its own), and holds it like what is prefetched; the pool
    does not have it. The decode worker keeps all else, and can compute the KV anew.
    """

    entry: Entry  # without pages
    wait_s: float  # until it joins again, as far as can be expected


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The answer to both, as each has come: Pull works for these from now on. Said again while they are there."""

    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class LetGo:
    """From a prefill worker: it has no room for these, or none any more; their KV is only in the pool, if anywhere."""

    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """From the pool to the decode worker that has the request already: its KV lies in these pages too."""

    request: str
    attempt: int
    pages: tuple[int, ...]
    names: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Keep:
    """From a decode worker, a Release: and these pages, full, hold what came after the first `num_known`."""

    request: str
    attempt: int
    num_known: int  # full pages of the entry, as it was handed out
    pages: tuple[int, ...]
    names: tuple[int, ...]  # of these pages


@dataclass(frozen=True, slots=True)
class AskBatch:
    """From a decode worker: requests to run, as far as they fit, in place of the ask before. For none: withdrawn."""

    pairs: int  # free block pairs
    requests: int  # free places in the step
    times: StepTimes = StepTimes()  # noqa: RUF009  (frozen)  what its steps take: who is urgent depends on it
    copy_token_s: float = 0.0  # until the KV of a token is on its device
    all_pairs: int = 0  # of the device
    most_requests: int = 1  # of a step
    band: tuple[int, int] | None = None  # the shortest and the longest prefix of those that run there
    cost: Coefficients = Coefficients()  # noqa: RUF009  (frozen)  of its decode steps
    rt_pairs: int = 0  # more of them, which best-effort requests have there, for real-time ones alone
    wants_batch: bool = True  # its next batch, whole: it has none before it
    ahead: int = 0  # so many of the band more than there is room for, to join as others end
    wait_s: float = 0.0  # from a batch's arrival there until a member of it joins, on average


@dataclass(frozen=True, slots=True)
class Batch:
    """From the pool to the decode worker that asked: its next batch, or candidate requests, which join before it."""

    entries: tuple[Entry, ...]
    is_pinned: bool = False  # they cannot wait: to be taken whatever room there is
    is_dynamic: bool = False  # as long as those that run there: they are of that batch


@dataclass(frozen=True, slots=True)
class Release:
    """From a worker: the request has left; its pages are free."""

    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Stages:
    """Open requests by where they are, as the router knows."""

    unplaced: int = 0
    prefill: int = 0  # with prefill workers
    pool: int = 0
    decode: int = 0  # with decode workers


@dataclass(frozen=True, slots=True)
class Figures:
    """From a pool or a worker to the router, which hands it to the gateways, for whoever watches; and of itself."""

    usage: Usage | None = None  # of a pool
    num_refused: int = 0  # copies from the pool in a worker's life: a page was not what it should be
    num_compressed: int = 0  # pages in a pool's life that became int8
    num_incompressible: int = 0  # and pages that could not
    num_failed_transfers: int = 0  # of KV between workers, in a worker's life, as either end saw it
    rebuilt_s: float | None = None  # of a router: from its start until it knew what was open, and where
    rt: Stages | None = None  # of a router: the open requests of each class
    be: Stages | None = None
    member: str = ""  # whose these are: the router says it


ROUTER = "router"  # its name: the one that everybody knows from the start

Message: TypeAlias = (
    Members
    | Heartbeat
    | Died
    | Retire
    | Submit
    | Cancel
    | Refused
    | AttemptLost
    | Prefill
    | Expect
    | Tokens
    | Resend
    | Acknowledge
    | Progress
    | Report
    | Declare
    | Holding
    | Inquire
    | Missed
    | AskPages
    | LeasePages
    | GiveBack
    | AskPrefix
    | Prefix
    | Spoiled
    | Compress
    | Compressed
    | Commit
    | Offer
    | Decline
    | Pull
    | Prefetch
    | Evict
    | Prefetched
    | LetGo
    | Kept
    | Keep
    | AskBatch
    | Batch
    | Release
    | Figures
)
