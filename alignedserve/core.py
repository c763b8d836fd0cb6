"""The nouns that all parts share. This file imports the standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite
from typing import NamedTuple


class Role(str, Enum):
    ROUTER = "router"
    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    POOL = "pool"
    JOBS = "jobs"  # the job runner


OWNERS = (Role.GATEWAY, Role.JOBS)  # of requests
WORKERS = (Role.PREFILL, Role.DECODE)
KEY_SALT_SIZE = 32  # characters of a request's salt that come from the key of the sender
NO_KEY_SALT = "-" * KEY_SALT_SIZE  # these characters where there are no keys, and a client chose a salt


class ServiceClass(str, Enum):
    RT = "rt"  # real-time: a deadline for every token
    BE = "be"  # best-effort: throughput, and a completion window


class FinishReason(str, Enum):
    STOP = "stop"  # a stop token ended the output, and is part of it
    LENGTH = "length"  # the output has max_tokens tokens
    ERROR = "error"  # the next token could not be sampled: the output ends before
    DOUBT = "doubt"  # the same, with KV that came from elsewhere and may be spoiled: the owner tries once more

    @property
    def has_token(self) -> bool:
        """Return whether a token came with the end."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class Rejection(str, Enum):
    """Why a request was not admitted, or not finished."""

    OPEN = "too_many_open"
    QUEUED = "queue_full"
    LATE = "too_late"  # others make the request late
    INFEASIBLE = "infeasible"  # the request would be late by itself
    GIVEN_UP = "given_up"  # a try failed, and another would fail too
    CULPRIT = "culprit"  # ended every worker that ran the request


class PreemptionCause(str, Enum):
    """Why a request had to leave a worker's steps before its end."""

    MEMORY = "memory"  # decodes had no room to grow
    AHEAD = "ahead"  # decodes would soon have had none: the KV went to a prefill worker
    REAL_TIME = "real_time"  # a real-time request took the memory
    LEVEL = "level"  # a request of a higher level took the memory
    WORTH = "worth"  # the memory was worth more to others
    CROWDED = "crowded"  # prompts had all memory, and none had enough


@dataclass(frozen=True, slots=True)  # a field is read in a fifth of the time that a named tuple takes
class KvForm:
    """The blocks that hold a request's KV on a device, and the form of that KV. Steps, chunks and decodes carry it.

        tokens   0 ··· dropped ──────────────────── prefix
        KV       none  blocks[0] blocks[1] blocks[2]               block_size tokens in each, the last may be part full

    Only a worker's memory says which KvForm a request has (worker/step/blocks.py): others hand it on as it is.
    """

    blocks: tuple[int, ...] = ()  # blocks in the order of the tokens, as kernels/common/spans.py reads them
    dropped: int = 0  # first tokens without KV, which was given up: `blocks` begin after these
    folded: int = 0  # first tokens that only layers without a window keep: `dropped` is what that spares
    form: str = ""  # the name of another form than KV (forms/): nothing in such a form goes elsewhere as it is
    in_place: int = 1  # tokens of that form in the place of one token of KV

    def room(self, block_size: int) -> int:
        """Return how many tokens the blocks have places for."""
        return len(self.blocks) * block_size * self.in_place

    def has_place(self, token: int, block_size: int) -> bool:
        """Return whether the blocks have a place for the token with this number."""
        return token - self.dropped < len(self.blocks) * block_size * self.in_place

    @property
    def can_move(self) -> bool:
        """Return whether other devices can take over what the blocks hold, block by block."""
        return not (self.form or self.folded)

    def can_be_stored_from(self, first: int) -> bool:
        """Return whether pages of the pool can hold the KV from token `first` on: plain KV, not folded."""
        return not self.form and self.folded <= first

    def remade(self, prefix: int) -> int:
        """Return for how many of the first `prefix` tokens each step computes K and V again."""
        return prefix if self.form else 0


NO_KV = KvForm()


class Deadline(Enum):
    """The deadlines of a request. Of several missed deadlines, the first in this order is named."""

    TTFT = "ttft"  # of the first token
    TBT = "tbt"  # of 99 of 100 gaps between tokens
    STALL = "stall"  # of the longest gap
    JCT = "jct"  # of the last token


DEADLINES = {ServiceClass.RT: (Deadline.TTFT, Deadline.TBT, Deadline.STALL), ServiceClass.BE: (Deadline.JCT,)}


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When a finished request got its tokens, in seconds."""

    ttft_s: float
    num_gaps: int
    num_late: int  # gaps that were longer than promised
    longest_gap_s: float
    all_s: float  # from arrival to end


@dataclass(frozen=True, slots=True)
class Slo:
    """The times that a request was promised, in seconds."""

    ttft_s: float = 1.0
    tbt_s: float = 0.1875  # the reading speed
    jct_s: float = 86_400.0
    strict: bool = False  # whether to refuse a request if the prompt alone takes longer than ttft
    is_asked: bool = True  # by the client or the operator; a request that asked for nothing waits in line instead

    @property
    def in_words(self) -> str:
        """Return the promise of a chat as people read it."""
        gap = f"{1e3 * self.tbt_s:g} ms" if self.tbt_s < 1 else f"{self.tbt_s:g} s"
        return f"first token in {self.ttft_s:g} s, then one each {gap}"

    @property
    def stall_s(self) -> float:
        """Return the gap between two tokens that breaks the promise by itself, however short all others are."""
        return max(5 * self.tbt_s, 1.0)

    def outcomes(self, service: ServiceClass, times: TokenTimes) -> dict[Deadline, bool]:
        """Return whether each deadline of the class was kept: the only definition of a kept promise."""
        kept = {
            Deadline.TTFT: times.ttft_s <= self.ttft_s,
            Deadline.TBT: 100 * times.num_late <= times.num_gaps,
            Deadline.STALL: times.longest_gap_s <= self.stall_s,
            Deadline.JCT: times.all_s <= self.jct_s,
        }
        return {deadline: kept[deadline] for deadline in DEADLINES[service]}


@dataclass(frozen=True, slots=True)
class Due:
    """When the next token of a real-time request is due: goes with the request from part to part."""

    at: float  # when the next token is due
    num_missed: int = 0  # dues in a row that were missed


@dataclass(frozen=True, slots=True)
class Choice:
    """A grammar: the output is an entry of `outputs`, followed by a stop token."""

    outputs: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.outputs or not all(self.outputs):
            raise ValueError("a choice must have outputs, each of a token or more")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning before an answer: a grammar holds for the answer alone, and a budget ends the reasoning."""

    family: str  # of the model, which has the markers (text/reasoning/families.py)
    inside: bool  # whether the output begins within the reasoning
    opening: tuple[int, ...]  # the tokens that begin the reasoning, if the output does not begin within
    closing: tuple[int, ...]  # the tokens that end the reasoning when the budget is used up
    most_tokens: int | None = None  # the budget
    calls: bool = False  # whether a call ends the reasoning too

    def __post_init__(self) -> None:
        if not self.closing:
            raise ValueError("a reasoning must have tokens that end it")
        if (self.most_tokens or 0) < 0:
            raise ValueError(f"most_tokens must be 0 or more, not {self.most_tokens}")


class _WeaklyHeld:
    """Gives a dataclass with slots a place for weak references, which Python 3.10 leaves out."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class Sampling(_WeaklyHeld):
    """The rules that choose a request's tokens from its logits.

    A choice depends only on the logits, the request's own tokens, the seed and the token's index in the output, so
    that an evicted, moved or restarted request goes on as if nothing had happened.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0  # tokens below this share of the likeliest token's probability are left out
    repetition_penalty: float = 1.0  # for tokens in prompt or output: divides logits above 0, multiplies logits below
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # subtracted once for each time that a token is in the output
    min_tokens: int = 0  # that the output has before a stop token may come
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, number that is added to the logit)
    allowed_tokens: bytes = b""  # the only tokens, as text/token_sets.py packs them; empty allows all
    grammar: Choice | None = None
    syntax: str = ""  # of the output's text, as llguidance writes grammars (syntax.py); empty: any text
    reasoning: Reasoning | None = None  # of an output with a budget for reasoning, or a grammar after it
    logprobs: int | None = None  # of each output token, and of this number of the likeliest tokens in that place
    prompt_logprobs: int | None = None  # the same for the prompt, from the second token on

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise ValueError(f"temperature must be 0 or more and finite, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be 0 to 1, not {self.min_p}")
        if not 0 < self.repetition_penalty < inf:
            raise ValueError(f"repetition_penalty must be above 0 and finite, not {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, not {getattr(self, name)}")
        for name in ("min_tokens", "logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not all(token >= 0 and isfinite(bias) for token, bias in self.logit_bias):
            raise ValueError("logit_bias must give token ids a finite number each")
        if self.grammar is not None and self.syntax:
            raise ValueError("a sampling has a grammar or a syntax, not both")

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def edits_logits(self) -> bool:
        """Return whether the request changes logits before the choice, by penalties or by limits."""
        limits = self.min_tokens or self.logit_bias or self.allowed_tokens or self.grammar or self.syntax
        return self.penalises or bool(limits) or self.reasoning is not None


@dataclass(frozen=True, slots=True)
class History:
    """A request's tokens, for the few requests with logits that depend on these. A worker keeps one per request."""

    prompt: tuple[int, ...]
    output: Sequence[int]  # the worker's list, which grows; for the token at index i the first i tokens count
    stop_tokens: tuple[int, ...]


class Logprob(NamedTuple):
    """A token's log-probability by the model alone, without temperature, penalties or limits."""

    value: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens in this place, likeliest first


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted length of an output, in tokens, made when the request came; for scheduling/lengths.py."""

    mean: int  # requests are ordered by this mean
    upper: int  # nine outputs of ten are not longer: memory is planned by this bound

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.upper:
            raise ValueError(f"an estimate must be at least 1 token, and at most its upper bound, not {self}")


@dataclass(frozen=True, slots=True)
class Sketch:
    """The part of a prompt that the length predictor sees."""

    hashes: bytes = b""  # of its tokens, the smallest: four bytes each (scheduling/sketch.py)


class PooledTask(str, Enum):
    """The kind of vector that a request without output asks for."""

    EMBED = "embed"  # what stands for the text among other texts
    SCORE = "score"  # the numbers of the model's head, as a reranker's


@dataclass(frozen=True, slots=True)
class Pooling:
    """The vector that a request asks for in place of an output. The model's folder says how to make the vector from
    the states of the tokens (architectures/vectors.py)."""

    task: PooledTask = PooledTask.EMBED
    is_whole: bool = False  # a step runs the whole prompt, with nothing from a cache: every token's state counts
    dimensions: int | None = None  # the first numbers that are kept
    second_at: int | None = None  # where the second of two texts begins, for models that mark the texts of a pair

    def __post_init__(self) -> None:
        for name, least in (("dimensions", 1), ("second_at", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be {least} or more, not {value}")


POOLED = 0  # the token that stands for a vector, as the only token of an output: cores see a request end with it


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter (LoRA) that changes the model for a request."""

    name: str
    folder: str  # where every worker finds the files
    id: str  # a hash of the content: KV of one content is never used for another of the same name


SUSPECT_DEATHS = 2  # from this number on a request runs alone, so that only this request can cause the next death


@dataclass(frozen=True, slots=True)
class Request:
    """An attempt at a prompt. Only the owner makes the next attempt, with the tokens emitted so far."""

    id: str
    owner: str  # the member that accepted the request and gets the tokens
    attempt: int
    prompt: tuple[int, ...]
    emitted: tuple[int, ...]  # output of earlier attempts: KV is computed for these tokens, which count as output
    sampling: Sampling
    max_tokens: int
    stop_tokens: tuple[int, ...]
    service: ServiceClass
    slo: Slo
    arrival_at: float
    priority: int = 0  # chosen by the client: lower first, among requests that are not urgent
    emitted_at: float | None = None  # when the last of `emitted` reached the owner
    salt: str = ""  # clients with another salt cannot tell from response times that this prompt was here
    estimate: Estimate | None = None  # from the client, or from the router
    pooling: Pooling | None = None  # of a request for a vector: the token POOLED is the output, and brings the vector
    adapter: Adapter | None = None
    deaths: int = 0  # workers in a row that ended with the request, at about the same place of the output
    weight: int = 1  # of the caller's part, where callers together want more than there is
    is_metered: bool = False  # the owner is told of the use (Used)
    tries: int = 0  # how often the client was refused before, as it says

    @property
    def is_suspect(self) -> bool:
        """Return whether the request may be the cause that workers end: then it runs alone on a worker."""
        return self.deaths >= SUSPECT_DEATHS

    @property
    def runs_whole(self) -> bool:
        """Return whether a single step runs the whole prompt."""
        return self.pooling is not None and self.pooling.is_whole

    @property
    def caller(self) -> str:
        """Return the part of the salt that tells the keys of a server apart, whatever salt a client added.

        Without keys all clients are a single caller: else a client could be as many callers as it likes."""
        of_key = self.salt[:KEY_SALT_SIZE]
        return "" if of_key == NO_KEY_SALT else of_key

    @property
    def kv_salt(self) -> bytes:
        """Return the salt and the adapter: requests share KV only where these are equal."""
        own = "" if self.adapter is None else f"\0{self.adapter.id}"
        return (self.salt + own).encode()

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.emitted

    @property
    def most_tokens(self) -> int:
        """Return the most tokens that prompt and output together can have."""
        return len(self.prompt) + self.max_tokens

    def finish(self, index: int, token: int) -> FinishReason | None:
        """Return why the output ends with `token` at `index`, or None if the output goes on."""
        if token in self.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if index + 1 >= self.max_tokens else None


class Opening(NamedTuple):
    """Facts about the prompt that a worker sends with the first token of the output."""

    logprobs: tuple[Logprob, ...] = ()  # of the prompt's tokens from the second on, where asked for
    num_cached: int = 0  # tokens of the prompt with KV in the pool or on a device
    waited_s: float = 0.0  # from the arrival to the first step with a part of the prompt
    vector: bytes = b""  # numbers of 4 bytes each, little-endian, where the request asks for a vector


NO_OPENING = Opening()


class Spent(NamedTuple):
    """What a request has used of workers: shares of steps."""

    seconds: float = 0.0
    joules: float = 0.0
    source: str = ""  # of the joules (machine/energy.py); of the last worker, where there were several

    def plus(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.joules + other.joules, other.source or self.source)


NOTHING_SPENT = Spent()


@dataclass(frozen=True, slots=True)
class Entry:
    """A request with its KV in the pool: all tokens but the last have KV there."""

    request: Request
    output: tuple[int, ...]  # all, earlier attempts included
    pages: tuple[int, ...]
    due: Due | None = None  # of a real-time request
    logprobs: tuple[Logprob, ...] = ()  # of this attempt's output, where asked for
    opening: Opening = NO_OPENING
    names: tuple[int, ...] = ()  # of the full pages: hashes of tokens; empty without a prefix cache
    dropped: int = 0  # first tokens without KV, since no layer reads it: `pages` begin after these, unnamed
    spent: Spent = NOTHING_SPENT  # in this attempt

    @property
    def prefix(self) -> int:
        """Return how many tokens were run."""
        return len(self.request.prompt) + len(self.output) - 1

    @property
    def num_held(self) -> int:
        """Return how many tokens have KV."""
        return self.prefix - self.dropped

    @property
    def kv(self) -> KvForm:
        """Return the form of the KV on a device where the request has no blocks yet."""
        return KvForm(dropped=self.dropped)


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of the pool's pages by present use; each page is in a single count."""

    rt: int = 0  # held by real-time requests only
    be: int = 0  # held by best-effort requests only
    shared: int = 0  # held by requests of both classes
    idle: int = 0  # held by no request, kept for later prompts with the same beginning
    leased: int = 0  # to workers, which write there
    free: int = 0


@dataclass(frozen=True, slots=True)
class Scoring:
    """Log-probabilities of prompt tokens: of each token that follows a token of the chunk."""

    tokens: tuple[int, ...]  # the following tokens; the chunk's last token may have none
    top: int


@dataclass(slots=True)
class Chunk:
    """A slice of a prompt in a step."""

    request: str
    tokens: tuple[int, ...]
    start: int  # number of the request's tokens that were run already
    kv: KvForm
    sampling: Sampling | None  # None unless this is the prompt's last chunk
    index: int = 0  # in the request's output, of the token that the chunk samples
    history: History | None = None  # where the sampling edits logits
    scoring: Scoring | None = None
    pooling: Pooling | None = None  # None unless this is the last chunk of a prompt that asks for a vector
    adapter: Adapter | None = None

    @property
    def num_before(self) -> int:
        """Return how many tokens the request holds before this chunk."""
        return self.start - self.kv.dropped

    @property
    def num_computed(self) -> int:
        """Return how many tokens it takes the time of: all logits of a scored token take about as long as the token."""
        return len(self.tokens) + (0 if self.scoring is None else len(self.scoring.tokens))

    @property
    def is_last(self) -> bool:
        """Return whether the prompt ends with this chunk: then a token or a vector comes."""
        return self.sampling is not None or self.pooling is not None


@dataclass(slots=True)  # made for each request in each step: a frozen class takes three times as long
class Decode:
    """A token of a running request in a step."""

    request: str
    token: int | None  # None: the token that the step before samples for the request
    start: int
    kv: KvForm
    sampling: Sampling
    index: int
    history: History | None = None  # where the sampling edits logits
    adapter: Adapter | None = None

    @property
    def num_before(self) -> int:
        """Return how many tokens the request holds before this token."""
        return self.start - self.kv.dropped


@dataclass(slots=True)
class Draw:
    """The first token of a request that waits. Its prompt equals another, which ends in this step: so do the logits."""

    request: str
    source: str  # the request of that chunk, the last of an equal prompt
    sampling: Sampling
    history: History | None = None  # where the sampling edits logits
    index: int = 0  # in the request's output


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class StepPlan:
    """A forward pass: what runs, and where the KV lies."""

    number: int
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    predicted_s: float = 0.0  # that the step will take, as the worker predicts
    draws: tuple[Draw, ...] = ()  # for requests that do not run

    @property
    def parts(self) -> tuple[Chunk | Decode, ...]:
        return (*self.chunks, *self.decodes) if self.chunks else self.decodes

    @property
    def num_tokens(self) -> int:
        return sum([len(chunk.tokens) for chunk in self.chunks]) + len(self.decodes)

    def continues(self, before: StepPlan) -> bool:
        """Return whether this step needs what the step before does: a token that it samples, or KV of a chunk."""
        begun = {(chunk.request, chunk.start + len(chunk.tokens)) for chunk in before.chunks}
        return any(decode.token is None for decode in self.decodes) or any(
            (chunk.request, chunk.start) in begun for chunk in self.chunks
        )


class FormOrder:
    """An order about the form of KV to the device (protocol/form_orders.py; performed: engine/forms/performing.py)."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FoldKv(FormOrder):
    """Fold blocks that lie behind the windows of a request, before the next work."""

    folds: tuple[tuple[int, ...], ...]  # a new block, then the old blocks to fold into it


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The device had too little memory for a step. The step has no result; all KV from before is still there."""

    why: str


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class StepResult:
    number: int
    tokens: tuple[tuple[str, int], ...]  # (request, sampled token)
    unsampled: tuple[str, ...] = ()  # requests without a token: logits are not finite, or limits allow no token
    logprobs: tuple[tuple[str, Logprob], ...] = ()  # for requests of `tokens` that ask for these
    prompt_logprobs: tuple[tuple[str, tuple[Logprob, ...]], ...] = ()  # of chunks that are scored
    failure: StepFailure | None = None  # then all else is empty
    vectors: tuple[tuple[str, bytes], ...] = ()  # (request, what the opening brings): the token is POOLED
    masks: tuple[tuple[str, float], ...] = ()  # (request, seconds that its grammar's mask took), where that is much


@dataclass(frozen=True, slots=True)
class Fallback:
    """What a process does in another way than usual (fallbacks.py)."""

    what: str  # that does not work; a label of the metric, so there are few names
    why: str
    instead: str  # what happens in place of it


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """The tokens that layers with a window, or with stretches, read.

    tokens          0 1 2 3 4 5 6 7 8 9      the token at 9 reads:
    window 4                    x x x x      the last four, with the token itself
    stretch 4       · · · ·|· · · ·|x x      the tokens of its stretch
    """

    window: int | None = None  # the widest of these layers; None: no layer has a window
    stretch: int | None = None  # tokens of a stretch; None: no layer has stretches

    def first_read(self, position: int) -> int:
        """Return the first token that the token at this position reads in any of these layers."""
        of_window = position if self.window is None else max(0, position + 1 - self.window)
        return of_window if self.stretch is None else min(of_window, position - position % self.stretch)

    @property
    def most(self) -> int:
        """Return the most tokens that any token reads in these layers."""
        return max(self.window or 0, self.stretch or 0)


@dataclass(frozen=True, slots=True)
class Fold:
    """How far KV is folded where layers with less sight stand beside layers that read all (engine/models/folding.py).

        old blocks     [all layers] [all layers] [all layers] ...   `blocks` blocks, read only by layers that read all
        folded block   [what layers that read all keep of these ]   the first tokens of a request lie in such blocks

    Tokens that a request no longer holds after a fold count as dropped.
    """

    sight: AttentionPattern  # of the layers that do not read all
    blocks: int  # that become a single block

    def __post_init__(self) -> None:
        assert min(self.blocks, self.sight.most + 1) > 1, "nothing comes free"

    def spared(self, folded: int) -> int:
        """Return how many tokens a request no longer holds after folding its first `folded`."""
        return folded - folded // self.blocks

    def folded(self, spared: int) -> int:
        """Return how many first tokens a request has folded if it no longer holds `spared` tokens."""
        return spared // (self.blocks - 1) * self.blocks

    def held(self, tokens: int) -> int:
        """Return for how many tokens a request of `tokens` tokens holds memory at most, without a group that is not
        full: all tokens that are read, and the folded share of the tokens before."""
        older = max(0, tokens - self.sight.most)
        return tokens - older + units_for(older, self.blocks)

    def foldable(self, tokens: int, block_size: int) -> int:
        """Return how many leading tokens of a request that has run `tokens` may be folded."""
        unread = self.sight.first_read(tokens)  # by the next token
        return unread - unread % (self.blocks * block_size)


@dataclass(frozen=True, slots=True)
class Retention:
    """How much memory requests take for their tokens; by default for all."""

    most: int | None = None  # tokens that a request needs memory for at once, beside a chunk's; None: all its tokens
    fold: Fold | None = None

    def of_prompt(self, tokens: int) -> int:
        """Return how many tokens a prompt of `tokens` holds at most, until the first token."""
        return tokens if self.most is None else min(tokens, self.most)

    def of_decode(self, tokens: int) -> int:
        """Return how many tokens a decode with `tokens` holds."""
        if self.fold is not None:
            return self.fold.held(tokens)
        return tokens if self.most is None else min(tokens, self.most)


KEEPS_ALL = Retention()


@dataclass(frozen=True)
class WorkerLimits:
    """The most that a worker may hold and run; prefill and decode workers have the same limits."""

    num_blocks: int
    block_size: int
    page_size: int
    max_step_tokens: int
    max_batch: int
    reach: int | None = None  # the last tokens that any layer reads, the newest included; None: all are kept
    fold: Fold | None = None  # None: KV of a token stays as it is

    def __post_init__(self) -> None:
        assert self.reach is None or self.fold is None, "what no layer reads is dropped, not folded"

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the device has slots for."""
        return self.num_blocks * self.block_size

    @property
    def gives_back(self) -> bool:
        """Return whether requests that run give back memory of tokens that layers read no more."""
        return self.reach is not None or self.fold is not None

    def unread(self, tokens: int) -> int:
        """Return how many leading tokens lie outside every layer's window after `tokens` were run, in whole pages."""
        if self.reach is None:
            return 0
        read = max(1, self.reach - 1)  # by the next token; a seated request holds something
        return max(0, tokens - read) // self.page_size * self.page_size

    @property
    def most_held(self) -> int | None:
        """Return the most tokens that a request needs memory for, beside a chunk's; None: all its tokens."""
        return None if self.reach is None else self.reach + self.page_size

    @property
    def retention(self) -> Retention:
        return Retention(self.most_held, self.fold)

    def least_held(self, tokens: int) -> int:
        """Return for how many of `tokens` a request needs memory at least; longer chunks need more."""
        return tokens if self.most_held is None else min(tokens, self.most_held)


@dataclass(frozen=True, slots=True)
class CopyCost:
    """The time to copy KV from the pool to the device."""

    token_s: float = 0.0
    fixed_s: float = 0.0  # of a copy, however small

    def seconds(self, tokens: int) -> float:
        return self.fixed_s + self.token_s * tokens


FREE_COPIES = CopyCost()  # where nothing is known of their time


def units_for(tokens: int, unit: int) -> int:
    """Return how many blocks, or pages, of `unit` tokens each hold `tokens`."""
    return -(-tokens // unit)
