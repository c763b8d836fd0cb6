"""The nouns that every part shares. Only the standard library is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite


class Role(str, Enum):
    ROUTER = "router"
    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    POOL = "pool"
    JOBS = "jobs"  # the job runner


OWNERS = (Role.GATEWAY, Role.JOBS)  # of requests
WORKERS = (Role.PREFILL, Role.DECODE)


class ServiceClass(str, Enum):
    RT = "rt"  # real-time: a deadline for every token
    BE = "be"  # best-effort: throughput, and a completion window


class FinishReason(str, Enum):
    STOP = "stop"  # a stop token, which ends the output and is part of it
    LENGTH = "length"  # max_tokens
    ERROR = "error"  # no next token could be sampled: the output ends before it


class CacheKind(str, Enum):
    """What is kept of a request's tokens on the device."""

    KV = "kv"
    HIDDEN = "hidden"  # each layer's input after its norm: half the memory, K and V are made anew in every step


@dataclass(frozen=True, slots=True)
class Slo:
    """What was promised, in seconds."""

    ttft_s: float = 1.0
    tbt_s: float = 0.1875  # the reading speed
    jct_s: float = 86_400.0


@dataclass(frozen=True, slots=True)
class Due:
    """Where a real-time request stands between two of its tokens: it goes with the request from part to part."""

    at: float  # of the next token
    num_left: int = 1  # tokens that are due together then
    num_missed: int = 0  # dues in a row


@dataclass(frozen=True, slots=True)
class Choice:
    """A grammar: the output is one of these, and then a stop token."""

    outputs: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.outputs or not all(self.outputs):
            raise ValueError("a choice must have outputs, each of a token or more")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen from its logits, in the order in which it is done.

    Beside the logits, the request's own tokens, the seed and the token's index in the output are all that a
    choice depends on, so that an evicted, moved or restarted request goes on as if nothing had happened.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0  # of the likeliest token's probability; less likely ones are left out
    repetition_penalty: float = 1.0  # divides logits above 0 of tokens in prompt or output, multiplies those below
    presence_penalty: float = 0.0  # off the logits of tokens in the output
    frequency_penalty: float = 0.0  # off them once for each time that they are there
    min_tokens: int = 0  # of the output, before a stop token may come
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what its logit gets)
    allowed_tokens: tuple[int, ...] = ()  # no others; empty allows all
    grammar: Choice | None = None
    syntax: str = ""  # of the output's text, as llguidance writes grammars (syntax.py); empty: any text
    logprobs: int | None = None  # so many of the likeliest at each place of the output, beside its own
    prompt_logprobs: int | None = None  # the same for the prompt, from its second token on

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
        if any(token < 0 for token in self.allowed_tokens):
            raise ValueError("allowed_tokens must be token ids")
        if self.grammar is not None and self.syntax:
            raise ValueError("a sampling has a grammar or a syntax, not both")

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the choice, by what the request has said or by what it may say."""
        limits = self.min_tokens or self.logit_bias or self.allowed_tokens or self.grammar or self.syntax
        return self.penalises or bool(limits)


@dataclass(frozen=True, slots=True)
class History:
    """A request's tokens, for the few whose logits they change: one object as long as it is on a worker."""

    prompt: tuple[int, ...]
    output: Sequence[int]  # the worker's own list: it grows there. At index i the first i count
    stop_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability by the model alone, without temperature, penalties or limits."""

    value: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens in its place, likeliest first


@dataclass(frozen=True, slots=True)
class Estimate:
    """How many tokens an output will have, as predicted when its request came; lengths.py says what to make of it."""

    mean: int  # by which requests are ordered
    upper: int  # nine of ten have no more: memory is reckoned by it

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.upper:
            raise ValueError(f"an estimate must be at least 1 token, and no more than its upper one, not {self}")


@dataclass(frozen=True, slots=True)
class Sketch:
    """What the length predictor sees of a prompt: the one or the other, as its encoder wants it."""

    counts: bytes = b""  # of hashed tokens (sketch.py)
    text: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt at one prompt. Its owner alone makes the next attempt, with what was emitted so far."""

    id: str
    owner: str  # the member that accepted it and gets its tokens
    attempt: int
    prompt: tuple[int, ...]
    emitted: tuple[int, ...]  # output of earlier attempts: KV is made for it, and it counts as output
    sampling: Sampling
    max_tokens: int
    stop_tokens: tuple[int, ...]
    service: ServiceClass
    slo: Slo
    arrival_at: float
    priority: int = 0  # the client's own: lower first, among requests that are not urgent
    emitted_at: float | None = None  # when the last of `emitted` reached the owner
    salt: str = ""  # whoever has another one cannot tell, by how soon it is answered, that this prompt was here
    estimate: Estimate | None = None  # by the client, or by the router, which may say it later (Expect)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.emitted

    @property
    def most_tokens(self) -> int:
        """Of prompt and output together."""
        return len(self.prompt) + self.max_tokens

    def finish(self, index: int, token: int) -> FinishReason | None:
        """Why the output ends with `token` at `index`, if it does."""
        if token in self.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if index + 1 >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class Entry:
    """A request whose KV lies in the pool: all its tokens but the last have KV there."""

    request: Request
    output: tuple[int, ...]  # all of it, earlier attempts included
    pages: tuple[int, ...]
    due: Due | None = None  # of a real-time request
    logprobs: tuple[Logprob, ...] = ()  # of this attempt's output, where it asks for them
    prompt_logprobs: tuple[Logprob, ...] = ()
    names: tuple[int, ...] = ()  # of its full pages, the hashes of their tokens; none where prompts are not reused
    num_cached: int = 0  # as in its first Output

    @property
    def prefix(self) -> int:
        """How many tokens have KV."""
        return len(self.request.prompt) + len(self.output) - 1


@dataclass(frozen=True, slots=True)
class Usage:
    """Pages of the pool by what they are now: each page is one of these."""

    rt: int = 0  # held by real-time requests alone
    be: int = 0  # by best-effort ones alone
    shared: int = 0  # by requests of both classes
    idle: int = 0  # nobody's, kept for whoever has the same beginning
    leased: int = 0  # to workers that write to them
    free: int = 0


@dataclass(frozen=True, slots=True)
class Scoring:
    """Log-probabilities of prompt tokens: of each that comes after one of the chunk's."""

    tokens: tuple[int, ...]  # which these are; all but perhaps the chunk's last are followed by one
    top: int


@dataclass(slots=True)
class Chunk:
    """A slice of a prompt in one step."""

    request: str
    tokens: tuple[int, ...]
    start: int  # how many of the request's tokens already have KV
    pairs: tuple[int, ...]  # its block pairs on the device, in the order of its tokens; none of kind HIDDEN
    sampling: Sampling | None  # None unless this is the prompt's last chunk
    index: int = 0  # of the token it samples in the request's output
    history: History | None = None  # where the sampling edits logits
    scoring: Scoring | None = None
    from_right: tuple[int, ...] = ()  # those of its pairs that are filled from their right end
    kind: CacheKind = CacheKind.KV
    blocks: tuple[int, ...] = ()  # of kind HIDDEN: single blocks, block 2p and 2p + 1 are the halves of pair p


@dataclass(slots=True)  # one for each request in each step: a frozen one takes three times as long to make
class Decode:
    """One token of a running request in one step."""

    request: str
    token: int | None  # None: the token that the step before this one samples for the request
    start: int
    pairs: tuple[int, ...]
    sampling: Sampling
    index: int
    history: History | None = None  # where the sampling edits logits
    from_right: tuple[int, ...] = ()  # as in Chunk
    kind: CacheKind = CacheKind.KV
    blocks: tuple[int, ...] = ()


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class StepPlan:
    """One forward pass: what runs, and where its KV lies."""

    number: int
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    predicted_s: float = 0.0  # what it will take, as far as the worker can tell

    @property
    def parts(self) -> tuple[Chunk | Decode, ...]:
        return (*self.chunks, *self.decodes) if self.chunks else self.decodes

    @property
    def num_tokens(self) -> int:
        return sum([len(chunk.tokens) for chunk in self.chunks]) + len(self.decodes)


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The device had too little memory for a step. Nothing has come of it, and what had KV before has it still."""

    why: str


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class StepResult:
    number: int
    tokens: tuple[tuple[str, int], ...]  # (request, the token sampled for it)
    unsampled: tuple[str, ...] = ()  # no token could be: logits that are not finite, or limits that leave none
    logprobs: tuple[tuple[str, Logprob], ...] = ()  # of those of `tokens` that ask for them
    prompt_logprobs: tuple[tuple[str, tuple[Logprob, ...]], ...] = ()  # of chunks that are scored
    failure: StepFailure | None = None  # then there is nothing else


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker may hold and run at most: the same for prefill and decode workers."""

    num_pairs: int
    block_size: int
    page_size: int
    max_step_tokens: int
    max_batch: int

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the device has slots for."""
        return self.num_pairs * self.block_size


def units_for(tokens: int, unit: int) -> int:
    """Return how many block pairs, or pages, of `unit` tokens each hold so many tokens."""
    return -(-tokens // unit)


def half_blocks(pairs: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks that hold the hidden vectors of a request with these pairs: both halves of each pair."""
    return tuple(block for pair in pairs for block in (2 * pair, 2 * pair + 1))
