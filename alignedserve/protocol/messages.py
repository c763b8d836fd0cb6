"""The messages that parts send to each other.

Facts are in the past tense, orders in the imperative. Messages travel as wire frames (wire.py); KV data never does: a
message carries page and block numbers. What a core hears from its shell is in events.py, its orders in commands.py;
messages that only a form of KV needs are in protocol/form_messages.py.

    owner ── Submit, Cancel, Declare ─▶ router ── Prefill ─▶ prefill worker ── Commit ─▶ pool
      ▲                                   │ ▲                                             │
      │   Refused, InLine, AttemptLost ◀──┘ └── Progress ── workers                     Batch
      └── Used, Tokens ◀── prefill and decode workers ◀───────────────────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from alignedserve.core import (
    FREE_COPIES,
    CopyCost,
    Entry,
    FinishReason,
    Logprob,
    Opening,
    Rejection,
    Request,
    Role,
    ServiceClass,
    Sketch,
    Slo,
    Spent,
    Usage,
)
from alignedserve.explain.decisions import Findings
from alignedserve.protocol.figures import (
    ByClass,
    DecodeLengths,
    DecodeSteps,
    PagesFor,
    ProcessFigures,
    Stages,
    WorkerLoad,
)
from alignedserve.protocol.form_messages import FormMessage
from alignedserve.scheduling.slo import StepTimes

# --- Membership: every part registers with the router, which announces it to the others.


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    role: Role
    node: str
    incarnation: int  # number of the process's life: a later start has a larger number
    address: str
    transport: str = ""  # endpoints of its ranks (roads.py), by which KV goes to and from it directly; empty: none
    lends: bool = False  # whether it is a prefill worker that also decodes; its role is DECODE then

    @property
    def kind(self) -> Role:
        """Return the role under which a topology counts it: PREFILL for a prefill worker that also decodes."""
        return Role.PREFILL if self.lends else self.role

    @property
    def holder(self) -> str:
        """Return the name under which this life holds leases and locks: a later life is another holder."""
        return holder(self.name, self.incarnation)


def rank_suffix(rank: int) -> str:
    """Return the ending of a rank's name. Rank 0 has none: to other parts it is the worker."""
    return f"-rank-{rank}" if rank else ""


def rank_of(part: str) -> int:
    """Return the rank of a part, which its name says."""
    return int(part.partition("-rank-")[2] or 0)


def worker_of(part: str) -> str:
    """Return the name of the worker that the part is a rank of; of another part, its own name."""
    return part.partition("-rank-")[0]


def holder(name: str, incarnation: int) -> str:
    return f"{name}.{incarnation}"


@dataclass(frozen=True, slots=True)
class Members:
    """The router tells at every change all members that the receiver deals with, and the receiver itself."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member tells the router that it lives, from a thread of its own: a worker in a long step is not dead.

    The heartbeat says everything about its sender: the first heartbeat registers the sender, and a router that has
    just started knows all members after one interval.
    """

    member: Member
    late_s: float = 0.0  # how long its present step has run, where that is far longer than predicted


@dataclass(frozen=True, slots=True)
class StepLate:
    """The router tells gateways, at each heartbeat, that a worker's step is late; with 0 s, that it is no more."""

    member: str
    late_s: float


@dataclass(frozen=True, slots=True)
class Life:
    """A life of a part that the launcher has started, or is about to start."""

    name: str
    role: Role
    incarnation: int


@dataclass(frozen=True, slots=True)
class Started:
    """A launcher tells the newest life of each of its parts, before it starts a life and again and again: the router
    hears no others."""

    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class Died:
    """A launcher tells that it saw the process end."""

    name: str
    incarnation: int
    felled: tuple[Attempt, ...] = ()  # those that its core was working on


@dataclass(frozen=True, slots=True)
class Retire:
    """A launcher retires a worker through the router: the worker gets no new requests, and ends when none is left."""

    name: str
    incarnation: int


# --- The way of a request.


@dataclass(frozen=True, slots=True)
class Submit:
    """An owner hands a request to the router."""

    request: Request
    sketch: Sketch | None = None  # None where its length is not to be predicted


@dataclass(frozen=True, slots=True)
class Cancel:
    """The owner or the router orders to drop this attempt at the request, and all before it."""

    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The router tells the owner that the request was not accepted."""

    request: str
    attempt: int
    reason: Rejection
    why: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The router tells the owner that a request will be late: the prompt alone takes longer than the ttft."""

    request: str
    attempt: int


class Place(NamedTuple):
    """The place of a chat that waits for its prompt to run."""

    request: str
    attempt: int
    num_before: int  # prompts that run before it
    seconds: float  # until the first token, as predicted


@dataclass(frozen=True, slots=True)
class InLine:
    """The router tells the owner where its chats are that wait in line: at once, and every few seconds."""

    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """The router tells the owner that the attempt is lost; the owner starts the next one."""

    request: str
    attempt: int
    died: bool = False  # the process that had it, or worked on it, has ended
    alone: bool = False  # ... and had nothing else, or worked on nothing else
    silent: bool = False  # the worker may have ended, or be cut off: the router says so again once it knows


@dataclass(frozen=True, slots=True)
class Acquit:
    """The owner tells the router that the request got past the place at which the last worker ended."""

    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """The router orders a worker to run the prompt."""

    request: Request
    decode: str = ""  # the decode worker with most room: a request that cannot wait in the pool goes there


@dataclass(frozen=True, slots=True)
class Reserve:
    """The router reserves a decode worker for requests that run alone, one after the other: the worker runs only the
    prompts that the router sends, and nothing of the pool joins. It answers with what it holds."""

    is_on: bool


class Output(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):  # made for each token
    """Some tokens of one request, the first at `index` of the whole output."""

    request: str
    attempt: int
    index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[Logprob, ...] = ()  # of each token, where asked for
    opening: Opening | None = None  # with the token at index 0, where there is anything to say


class Tokens(NamedTuple):
    """A worker sends an owner the tokens that one step emitted for the owner's requests."""

    outputs: tuple[Output, ...]


class RequestUse(NamedTuple):
    request: str
    attempt: int
    spent: Spent  # in this attempt, on all workers so far


@dataclass(frozen=True, slots=True)
class Used:
    """A worker tells an owner what metered requests have used, before the tokens that this was spent on: at a request's
    end, and each time the use has grown by a good deal."""

    uses: tuple[RequestUse, ...]


@dataclass(frozen=True, slots=True)
class Resend:
    """An owner that missed tokens asks for the output again, from `index` on."""

    request: str
    attempt: int
    index: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """An owner tells that it has the whole output: the worker may forget it."""

    requests: tuple[str, ...]


Attempt: TypeAlias = tuple[str, int]  # (request, attempt)


SEEN_S = 4.0  # after which what a worker saw of prompts that had to wait counts e times less


@dataclass(frozen=True, slots=True)
class Backlog:
    """The prompts that a worker has still to run, and the time of one more; all zero where nothing is known yet."""

    prompts_s: float = 0.0  # to compute what neither device nor pool has, and to copy what the pool has
    prompt_token_s: float = 0.0  # of a prompt token alone, by the cost model
    rt_prompts_s: float = 0.0  # of real-time requests alone
    loaded_token_s: float = 0.0  # of one more prompt token behind and beside what is there
    rt_loaded_token_s: float = 0.0  # the same of a real-time prompt
    copying: CopyCost = FREE_COPIES  # from the pool of its node


@dataclass(frozen=True, slots=True)
class Progress:
    """A worker or pool tells the router which attempts have reached another stage."""

    committed: tuple[Attempt, ...] = ()  # the pool has the KV
    joined: tuple[Attempt, ...] = ()  # run on the sending decode worker
    ended: tuple[Attempt, ...] = ()
    lengths: tuple[int, ...] = ()  # of the outputs of `ended`, tokens of earlier attempts included
    lost: tuple[Attempt, ...] = ()  # the KV is lost: the owner starts the next attempt
    unknown: tuple[Attempt, ...] = ()  # the router inquired about these, and they are not here
    returned: tuple[Attempt, ...] = ()  # from the sending decode worker to the pool
    free_blocks: int = 0
    backlog: Backlog = Backlog()
    felled: tuple[Attempt, ...] = ()  # the sender's core has ended at them, or is about to
    # The worker that sent the KV, or that had to answer the offer of KV, has gone, perhaps because of these attempts.
    cut: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A decode worker reports its load to the router, every few steps and when it is idle: the last report counts."""

    band: tuple[int, int] | None = None  # the shortest and the longest prefix in the running batch
    free_blocks: int = 0
    step_s: float = 0.0  # mean time of its steps
    num_rt: int = 0  # running real-time requests
    num_late: int = 0  # running real-time requests with the next token late
    given_blocks: int = 0  # that best-effort requests have, and give to chats


@dataclass(frozen=True, slots=True)
class Declare:
    """An owner tells a router that has just started all its open requests, some in each frame."""

    requests: tuple[Request, ...]
    is_last: bool = True  # no frame follows


@dataclass(frozen=True, slots=True)
class Holding:
    """A worker or pool tells a router that has just started, or missed frames, which attempts it holds."""

    attempts: tuple[Attempt, ...]
    free_blocks: int = 0
    is_retiring: bool = False  # the worker takes no new requests
    is_reserved: bool = False  # nothing joins there but what the router sends
    waiting: tuple[Attempt, ...] = ()  # of the attempts: those whose prompt has not begun


# --- Messages that repair what a lost frame, or a frame lost with its receiver, has left behind.


@dataclass(frozen=True, slots=True)
class Inquire:
    """An owner asks the router, and the router the parts, whether these attempts are still there.

    The router answers AttemptLost for what it does not know, others answer with Progress(unknown); a decode
    worker answers the pool with Release.
    """

    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Missed:
    """Frames of the receiver did not arrive at the sender: tell the sender again what it must know."""


# --- The pool.


@dataclass(frozen=True, slots=True)
class AskPages:
    """A worker asks the pool for free pages to write to, and returns all its other pages but the kept ones.

    So each ask repairs what a lost frame left behind. It replaces the ask before it.
    """

    pages: int
    number: int = 0  # of the ask
    kept: tuple[int, ...] = ()
    is_spare: bool = False  # pages to have at hand: all that are free while no ask waits, until the pool says GiveBack


@dataclass(frozen=True, slots=True)
class LeasePages:
    """The pool leases pages to a worker until it commits them, asks without keeping them, or is gone."""

    pages: tuple[int, ...]
    number: int = 0  # of the ask that this answers


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The pool asks for spare pages back: another worker waits for pages. The receiver keeps only the pages that it
    writes to, and then asks again."""


@dataclass(frozen=True, slots=True)
class AskPrefix:
    """A prefill worker asks the pool to hold the cached pages with these names, the beginning of this attempt."""

    request: str
    attempt: int
    names: tuple[int, ...]
    service: ServiceClass = ServiceClass.RT


@dataclass(frozen=True, slots=True)
class Prefix:
    """The pool's answer: these pages hold the first tokens. They stay until a Commit or a Release names them; or until
    the pool needs them for a worker that waits, and says so with another answer that has no pages."""

    request: str
    attempt: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A worker tells that these pages do not hold what their names say, or that no token could be sampled after them.
    The pool hands them out no more."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """A worker hands the entry's pages, now written, to the pool. Pages that the pool keeps already come first.

    A decode worker commits a request that has to leave the device, and waits again.
    """

    entry: Entry
    num_known: int = 0  # full pages that the pool keeps: of the Prefix, or of the entry as it was handed out
    to: str = ""  # the decode worker that gets a request that cannot wait for a batch


@dataclass(frozen=True, slots=True)
class Offer:
    """A prefill worker that has finished a prompt offers the request, with the KV, to a decode worker of its peers.

    The offer is repeated until the receiver answers: with Pull once there is room for the request, or with Decline.
    """

    entry: Entry  # without pages
    has_pool: bool = True  # the request has another way; without, it waits at the receiver, never declined


@dataclass(frozen=True, slots=True)
class Decline:
    """A decode worker declines an offer: it has no room, or the KV did not come."""

    request: str
    attempt: int
    is_failed: bool = False  # the KV was pulled and did not come


@dataclass(frozen=True, slots=True)
class Pull:
    """A decode worker asks for the KV of an offered attempt, and waits for the KV (ReceiveKv)."""

    number: int  # of the transfer; numbers rise between two lives of workers, in each direction
    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Kept:
    """The pool tells the request's decode worker that it holds these pages, the first tokens."""

    request: str
    attempt: int
    pages: tuple[int, ...]
    names: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Keep:
    """A decode worker hands on full pages that hold the request's tokens after those of the first `num_known` pages.

    The worker releases the request, or `goes_on`: then the pool holds all of these pages for the request, and says
    which (Kept).
    """

    request: str
    attempt: int
    num_known: int  # full pages that the pool holds for the request
    pages: tuple[int, ...]
    names: tuple[int, ...]  # of these pages
    service: ServiceClass = ServiceClass.RT
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class AskBatch:
    """A decode worker asks for requests to run, as many as fit. The ask replaces the one before; an ask for none
    withdraws it."""

    blocks: int  # free blocks
    requests: int  # free places in the step
    times: StepTimes = StepTimes()  # noqa: RUF009  (frozen)  of its steps: they say which requests are urgent
    copy_token_s: float = 0.0  # until the KV of a token is on its device
    all_blocks: int = 0  # of the device
    most_requests: int = 1  # the largest batch size of a step
    band: tuple[int, int] | None = None  # the shortest and the longest prefix that runs there
    rt_blocks: int = 0  # more blocks, which best-effort requests have there: for real-time requests only
    wants_batch: bool = True  # its next batch, whole: no batch is waiting there
    ahead: int = 0  # requests of the band beyond the room, to join as others end
    wait_s: float = 0.0  # from a batch's arrival there until a member of it joins, on average


@dataclass(frozen=True, slots=True)
class Batch:
    """The pool hands the decode worker that asked its next batch, or candidate requests, which join before the
    batch."""

    entries: tuple[Entry, ...]
    is_pinned: bool = False  # the requests cannot wait: take them, whatever room there is
    is_dynamic: bool = False  # the prefixes are in the band of the running batch: the requests join that batch


@dataclass(frozen=True, slots=True)
class Release:
    """A worker tells that the request has left; its pages are free, or held for the worker that has the request now."""

    request: str
    attempt: int
    to: str = ""  # that worker, where the KV has gone there directly


@dataclass(frozen=True, slots=True)
class Figures:
    """A pool or a worker sends figures to the router, which hands them and its own to the gateways, for metrics and
    the live page."""

    usage: Usage | None = None  # of a pool
    num_refused: int = 0  # copies from the pool, in a worker's life, that found a wrong page
    num_compressed: int = 0  # pages in a pool's life that became int8
    num_incompressible: int = 0  # pages in a pool's life that could not become int8
    num_failed_transfers: int = 0  # of KV between workers, in a worker's life, as this end saw it
    rebuilt_s: float | None = None  # of a router: from its start until it knew all open requests and their places
    steps: DecodeSteps | None = None  # of a decode worker
    lengths: DecodeLengths | None = None  # likewise
    holders: tuple[PagesFor, ...] = ()  # of a pool
    slowdown: float = 0.0  # of a worker: how many times as long steps take as in its profile
    worker: WorkerLoad | None = None  # of a worker
    process: ProcessFigures | None = None  # of the sender: its shell fills it in
    rt: Stages | None = None  # of a router: the open requests of each class
    be: Stages | None = None
    returned: ByClass = ByClass()  # noqa: RUF009  (frozen)  with them: requests that workers gave back to the pool
    lost: ByClass = ByClass()  # noqa: RUF009  ... and attempts that were lost
    member: str = ""  # the member that these are about: the router fills it in
    promise: Slo | None = None  # of a worker: what it can promise chats that ask for nothing; None: it does not know


@dataclass(frozen=True, slots=True)
class AskDecisions:
    """A gateway asks the router and the workers what they decided about a request."""

    number: int  # of the question
    request: str


@dataclass(frozen=True, slots=True)
class Decisions:
    """The answer: what the part remembers of the request."""

    number: int
    now: float  # by the clock of the part
    findings: Findings


ROUTER = "router"  # the name that every member knows from the start
LAUNCHER = "launcher"  # the sender of what only the launcher may say

Message: TypeAlias = (
    Members
    | Heartbeat
    | StepLate
    | Started
    | Died
    | Retire
    | Submit
    | Cancel
    | Refused
    | Infeasible
    | InLine
    | AttemptLost
    | Acquit
    | Prefill
    | Reserve
    | Tokens
    | Used
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
    | Commit
    | Offer
    | Decline
    | Pull
    | Kept
    | Keep
    | AskBatch
    | Batch
    | Release
    | Figures
    | AskDecisions
    | Decisions
    | FormMessage
)
