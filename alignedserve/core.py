"""The nouns that every part shares. Only the standard library is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf


class Role(str, Enum):
    ROUTER = "router"
    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    POOL = "pool"


class ServiceClass(str, Enum):
    RT = "rt"  # real-time: a deadline for every token
    BE = "be"  # best-effort: throughput, and a completion window


class FinishReason(str, Enum):
    STOP = "stop"  # a stop token, which ends the output and is part of it
    LENGTH = "length"  # max_tokens


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
class Sampling:
    """How a request's tokens are chosen from its logits.

    Beside the logits, the seed and the token's index in the output are all that a choice depends
    on, so that an evicted, moved or restarted request goes on as if nothing had happened.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise ValueError(f"temperature must be 0 or more and finite, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")


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

    @property
    def prefix(self) -> int:
        """How many tokens have KV."""
        return len(self.request.prompt) + len(self.output) - 1


@dataclass(slots=True)
class Chunk:
    """A slice of a prompt in one step."""

    request: str
    tokens: tuple[int, ...]
    start: int  # how many of the request's tokens already have KV
    pairs: tuple[int, ...]  # its block pairs on the device, in the order of its tokens
    sampling: Sampling | None  # None unless this is the prompt's last chunk
    index: int = 0  # of the token it samples in the request's output


@dataclass(slots=True)  # one for each request in each step: a frozen one takes three times as long to make
class Decode:
    """One token of a running request in one step."""

    request: str
    token: int | None  # None: the token that the step before this one samples for the request
    start: int
    pairs: tuple[int, ...]
    sampling: Sampling
    index: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: what runs, and where its KV lies."""

    number: int
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    predicted_s: float = 0.0  # what it will take, as far as the worker can tell

    @property
    def parts(self) -> tuple[Chunk | Decode, ...]:
        return (*self.chunks, *self.decodes)


@dataclass(frozen=True, slots=True)
class StepResult:
    number: int
    tokens: tuple[tuple[str, int], ...]  # (request, the token sampled for it)
