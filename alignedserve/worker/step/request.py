"""A request on a worker."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from alignedserve.core import (
    NO_KV,
    Chunk,
    Decode,
    Entry,
    FinishReason,
    History,
    KvForm,
    Logprob,
    Opening,
    Request,
    Scoring,
    Spent,
)
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import Attempt, Member, Offer, Pull
from alignedserve.scheduling.dues import Promise
from alignedserve.scheduling.slo import Work
from alignedserve.worker.step.states import TRANSITIONS, IllegalTransition, State

MOST_SCORED = 256  # tokens of a chunk, where their log-probabilities are asked for


_SETTLED = (State.RESIDENT, State.WAITING, State.GONE)  # the request neither comes nor leaves


@dataclass(eq=False, slots=True)  # two requests are never equal, whatever they hold
class WorkerRequest:
    """A request as a worker knows it. With a seat, the first `prefix` tokens have KV where `kv` says.

    Before that, the device may have KV of the first tokens for other requests, which would share it (device_pages.py).

    One module writes each field: this one, by methods that say what happened, but for `kv` (blocks.py, for a memory),
    `promise` (waiting_prompts.py), `block_names` (pool.py), `tells_beyond_s` (owners.py) and `batch` (joining.py).
    """

    request: Request
    promise: Promise
    output: list[int]  # all, earlier attempts included
    kv: KvForm = NO_KV
    prefix: int = 0
    known: tuple[int, ...] = ()  # pages of the pool that hold the first tokens, kept there for this request
    fetched_from: int = 0  # where these are copied here with the seat: tokens that were here before, ...
    fetched_to: int = 0  # ... and tokens that are here afterwards; 0 where all is computed
    fetch_s: float = 0.0  # the time of that copy
    names: tuple[int, ...] = ()  # hashes of the tokens of the first full pages, as many as were needed so far
    block_names: tuple[int, ...] = ()  # the same of the first full blocks
    looked_up: int = -1  # the version of the device's pages at which these two were found, of a prompt that waits
    num_cached: int = 0  # tokens of the prompt with KV before any was computed for this request
    waited_s: float | None = None  # from arrival to first chunk; KV found later may be the request's own
    logprobs: list[Logprob] = field(default_factory=list)  # of this attempt's output, where asked for
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    vector: bytes = b""  # where the request asks for that
    spent_s: float = 0.0  # shares of steps in this attempt, on all workers so far
    spent_joules: float = 0.0  # ... and of their energy
    tells_beyond_s: float = 0.0  # of `spent_s`: with a later token the owner is told again
    came_with_kv: bool = False  # whether some KV was copied here, or computed for another request
    decode: str = ""  # the decode worker that the router named
    batch: int = 0  # the pool's batch that the request came in; 0 of a prompt
    candidate: JoinCandidate | None = None  # while the request waits to join, or is being received
    departure: Departure | None = None  # while the request leaves for another worker
    finish: FinishReason | None = None  # why the output has ended
    story: list[State] = field(default_factory=lambda: [State.NEW])  # the states so far (states.py)
    history: History | None = field(init=False)  # the tokens, where sampling needs them
    has_tokens: bool = field(init=False)  # tokens are asked for, and not a vector: KV is of use after the prompt
    last_token_at: float = field(init=False)  # when the last token came, or the request: pending since then

    def __post_init__(self) -> None:
        request = self.request
        self.last_token_at = request.arrival_at if request.emitted_at is None else request.emitted_at
        self.has_tokens = request.pooling is None
        needed = request.sampling.edits_logits
        self.history = History(request.prompt, self.output, request.stop_tokens) if needed else None

    @property
    def key(self) -> Attempt:
        return self.request.id, self.request.attempt

    @property
    def state(self) -> State:
        return self.story[-1]

    def becomes(self, state: State) -> None:
        """Take a transition of the table. Where the request is among the worker's, worker/requests.py calls this."""
        if state not in TRANSITIONS[self.story[-1]]:
            raise IllegalTransition(self.key, self.story, state)
        self.story.append(state)
        if state in _SETTLED:
            self.candidate = self.departure = None

    def comes_as(self, candidate: JoinCandidate) -> None:
        self.candidate = candidate

    def leaves_by(self, departure: Departure) -> None:
        self.departure = departure

    def is_at(self, part: Chunk | Decode) -> bool:
        """Return whether this part of a step ran for this attempt, by the places of KV.

        The request may have got more blocks since, for a step that was planned while that one ran.
        """
        if self.kv is part.kv:  # mostly
            return True
        here, planned, drops_more = self.kv.blocks, part.kv.blocks, self.kv.dropped > part.kv.dropped
        if drops_more and self.kv.folded:  # a step in flight writes to the last block
            return planned[-1] in here
        if drops_more and here[:1] and here[0] in planned:
            planned = planned[planned.index(here[0]) :]
        return here[: len(planned)] == planned

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def num_ahead(self) -> int:
        """Return how many tokens have to run before the next token can be sampled; copied tokens do not count."""
        return self.num_tokens - max(self.prefix, self.fetched_to)

    @property
    def is_fetched(self) -> bool:
        """Return whether pages of the pool are copied here as soon as the request is seated."""
        return self.fetched_to > 0

    # --- Where KV comes from

    def found(self, tokens: int, version: int) -> None:
        """Note that by this version of its pages the device has KV of the first tokens; there are no blocks yet."""
        self.prefix, self.looked_up = tokens, version
        self.end_fetch()

    def look_again(self) -> None:
        """Note that the device or the pool may have more of the request, or less, than at the last look."""
        self.looked_up = -1

    def plan_fetch(self, start: int, end: int, seconds: float) -> None:
        """Have the tokens from `start` to `end` copied from the pool once the request is seated."""
        self.prefix = self.fetched_from = start
        self.fetched_to, self.fetch_s = end, seconds

    def fetch_from(self, start: int) -> None:
        """Have the tokens from `start` on copied from the pool, which has KV of all tokens."""
        self.fetched_from = start

    def begin_fetch(self, page_size: int) -> None:
        """Note that the pages that the pool keeps for the request are being copied here."""
        self.prefix = len(self.known) * page_size

    def end_fetch(self) -> None:
        """Note that no copy from the pool is due or under way."""
        self.fetched_to, self.fetch_s = 0, 0.0

    def forget_known(self) -> None:
        """Note that the pool keeps no page for the request."""
        self.known = ()
        if not self.blocks:  # else a copy may be under way
            self.end_fetch()

    def came_with(self, tokens: int) -> None:
        """Note that KV of the first tokens was computed for other requests, or copied here."""
        self.came_with_kv |= tokens > 0
        if self.waited_s is None:
            self.num_cached = min(tokens, len(self.request.prompt))

    def start_over(self) -> None:
        """Note that the KV is lost: the request is recomputed."""
        self.prefix = 0

    def drop_names(self) -> None:
        """Forget the page names: the first blocks are lost, and the request is not found by these names any more."""
        self.names = ()

    def named(self, names: tuple[int, ...]) -> tuple[int, ...]:
        """Take over names of the first full pages, and return the names."""
        self.names = names
        return names

    def goes_anywhere(self) -> None:
        """Have the request go on where there is room first, and not at the worker that the router named."""
        self.decode = ""

    # --- What runs

    @property
    def most_in_chunk(self) -> int:
        """Return how many tokens one chunk may run: logits of all tokens of a scored chunk take much memory."""
        return min(self.num_ahead, MOST_SCORED) if self.is_scored else self.num_ahead

    @property
    def is_scored(self) -> bool:
        """Return whether the owner gets log-probabilities of the prompt, which go with the first token."""
        return self.request.sampling.prompt_logprobs is not None and not self.output

    def scoring(self, end: int) -> Scoring | None:
        """Return which tokens of a chunk from the prefix to `end` are scored, if any."""
        top = self.request.sampling.prompt_logprobs
        if top is None or not self.is_scored:
            return None
        return Scoring(self.request.prompt[self.prefix + 1 : end + 1], top)

    def ran(self, tokens: int, seconds: float, joules: float) -> None:
        """Note that these tokens ran and have KV now; charge the request with its share of the step."""
        self.prefix += tokens
        self.spent_s += seconds
        self.spent_joules += joules

    def count_as_run(self, tokens: int) -> None:
        """Count tokens of the running step as if they had KV, for the plan of the step behind it; below 0: no more."""
        self.prefix += tokens

    def end_chunk(self, ran: Chunk, began_at: float, scores: tuple[Logprob, ...] = (), vector: bytes = b"") -> None:
        """Note what a chunk brought beside KV: log-probabilities of a scored chunk, a vector that was asked for."""
        if ran.scoring is not None:
            # A chunk that runs again, as after a loss of blocks, replaces only its own scores: later tokens may come
            # back from the pool, and are not scored again.
            self.prompt_logprobs[ran.start : ran.start + len(scores)] = scores
        self.vector = vector
        if self.waited_s is None:
            self.waited_s = max(0.0, began_at - self.request.arrival_at)
        if not ran.is_last:
            self.promise.chunk_ran()

    def emit(self, token: int, now: float, logprob: Logprob | None = None) -> None:
        """Add a token to the output, which may end with this token."""
        output = self.output
        output.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        num_output = len(output)
        self.last_token_at = now
        self.promise.emitted(now, num_output)
        self.finish = self.request.finish(num_output - 1, token)

    def fail(self) -> None:
        """Note that the next token could not be sampled: where some KV came from elsewhere, that may be spoiled."""
        self.finish = FinishReason.DOUBT if self.came_with_kv else FinishReason.ERROR

    def entry(self, pages: tuple[int, ...], names: tuple[int, ...]) -> Entry:
        """Return the request in the form for the pool."""
        output, due = tuple(self.output), self.promise.due
        kept = tuple(self.logprobs), self.opening, names, self.num_lost, self.spent
        return Entry(self.request, output, pages, due, *kept)

    @property
    def spent(self) -> Spent:
        return Spent(self.spent_s, self.spent_joules)

    @property
    def opening(self) -> Opening:
        """Return what the owner gets with the first token."""
        return Opening(tuple(self.prompt_logprobs), self.num_cached, self.waited_s or 0.0, self.vector)

    def resume(self, entry: Entry, page_size: int) -> None:
        """Take over the progress of the request on other workers."""
        self.request = replace(self.request, estimate=entry.request.estimate)
        self.output[:] = entry.output
        self.prefix, self.logprobs = entry.prefix, list(entry.logprobs)
        self.spent_s, self.spent_joules, _ = entry.spent
        opening = entry.opening
        self.prompt_logprobs, self.num_cached = list(opening.logprobs), opening.num_cached
        self.waited_s = opening.waited_s
        full = 0 if entry.dropped else entry.prefix // page_size
        self.known, self.names = entry.pages[:full], entry.names[:full]

    def kept_in_pool(self, pages: tuple[int, ...], names: tuple[int, ...] = ()) -> None:
        """Note the pool's pages that hold the first tokens: a waiting request may be seated on these pages."""
        self.known, self.names, self.looked_up = pages, names or self.names, -1

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.kv.blocks

    @property
    def num_lost(self) -> int:
        """Return how many of the first tokens have no KV here any more, in any layer."""
        return 0 if self.kv.folded else self.kv.dropped

    @property
    def num_held(self) -> int:
        """Return how many tokens have KV, which is about what a step reads."""
        return self.prefix - self.kv.dropped

    @property
    def kept_tokens(self) -> tuple[int, ...]:
        """Return the tokens that have KV."""
        return self.tokens(self.kv.dropped, self.prefix)

    @property
    def num_remade(self) -> int:
        """Return for how many tokens each step with the request makes K and V again."""
        return self.kv.remade(self.prefix)

    @property
    def decodes(self) -> bool:
        """Return whether the request decodes: a single step brings the next token."""
        num_output, request = len(self.output), self.request
        return len(request.prompt) + num_output - self.prefix == 1 and num_output > len(request.emitted)

    def work(self, chunk: int) -> Work:
        """Return the work until the next due, where prompts run in chunks of this size."""
        if self.decodes:
            return Work()
        return Work(self.num_ahead, chunk, transfer_s=self.fetch_s if self.promise.is_rt else 0.0)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return tokens of prompt and output together."""
        prompt = len(self.request.prompt)
        if start >= prompt:
            return tuple(self.output[start - prompt : end - prompt])
        return self.request.prompt[start:end] + tuple(self.output[: max(0, end - prompt)])


def attempt_of(request: Request) -> Attempt:
    """Return the name of the request with the number of its attempt."""
    return request.id, request.attempt


# --- What a worker knows of a request only while it comes from elsewhere, or leaves for another worker. While KV is
# copied to blocks, or read there, nothing else is written to these blocks: the request is in no step, and keeps the
# blocks until the copy has ended, wanted or not.


@dataclass(eq=False)
class JoinCandidate:
    """A request that waits to join the decoding requests, or with KV on the way here."""

    running: WorkerRequest
    came: Entry  # from the pool or from another worker; with the pages, where the KV is in the pool
    source: Member | None  # the worker that has the KV; None where the pool has it
    due_at: float  # the next token
    since: float
    is_pinned: bool = False
    batch: int = 0  # the tag of the candidate batch; 0 of a candidate request
    found_for: int = 0  # the running batch, of about this length, that the pool found the candidate for
    partner: Member | None = None  # the worker that is to hold the KV for this worker; once it does, also the source
    is_refused: bool = False  # the partner had no room for the KV
    awaits_syntax: bool = False  # the syntax is being compiled: a step with the request would wait
    is_evicted: bool = False  # the request had to leave this worker; the source alone has the KV
    transfer: tuple[str, int] | None = None  # that writes to the blocks: holder of the source, number

    @property
    def is_rt(self) -> bool:
        return self.running.promise.is_rt

    @property
    def is_copied(self) -> bool:
        """Return whether the partner's KV is, or is to be, a copy of what the pool has."""
        return self.partner is not None and not self.is_evicted

    @property
    def key(self) -> Attempt:
        return self.running.key

    @property
    def entry(self) -> Entry:
        """Return the request as it came, with the newest estimate."""
        return replace(self.came, request=self.running.request)

    @property
    def pull(self) -> Command:
        """Ask the source for the KV."""
        assert self.source is not None, "the KV comes from another worker"
        assert self.transfer is not None, "the KV comes from another worker"
        return Send(self.source.name, Pull(self.transfer[1], *self.key))


@dataclass(eq=False)
class Departure:
    """A request that is to leave with its KV for another worker, and to go on there."""

    goes_on_there = True  # else the request comes back

    running: WorkerRequest  # with blocks
    to: Member
    number: int | None = None  # of the transfer, once pulled
    waits_there: bool = False  # for room, perhaps long: there is no other way, and no decline
    is_declined: bool = False  # by that worker, while a transfer still reads the blocks

    @property
    def entry(self) -> Entry:
        return self.running.entry((), self.running.names)

    @property
    def ask(self) -> Command:
        """Ask the other worker to pull the KV."""
        return Send(self.to.name, Offer(self.entry, not self.waits_there))

    @property
    def is_wanted(self) -> bool:
        return self.running.state is State.DEPARTING
