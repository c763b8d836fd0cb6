"""A request on a worker, the block pairs that it takes there, and what the worker may take in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.core import Chunk, Decode, FinishReason, Request
from alignedserve.messages import Attempt
from alignedserve.promise import Promise
from alignedserve.slo import Work


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker may take: the same for prefill and decode workers."""

    num_pairs: int
    block_size: int
    page_size: int
    max_step_tokens: int
    max_batch: int


def units_for(tokens: int, unit: int) -> int:
    """Block pairs, or pages, of so many tokens each."""
    return -(-tokens // unit)


class Blocks:
    """Free block pairs of a device."""

    def __init__(self, num_pairs: int) -> None:
        self._free = list(range(num_pairs))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """So many pairs, or None where there are fewer."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give(self, pairs: Sequence[int]) -> None:
        self._free.extend(pairs)


@dataclass(eq=False)  # one is no other, whatever both hold
class Running:
    """What a worker knows of a request it has: `prefix` of its tokens have KV in `pairs`, which it gets when seated."""

    request: Request
    promise: Promise
    output: list[int]  # all of it, earlier attempts included
    pairs: tuple[int, ...] = ()
    prefix: int = 0

    @property
    def key(self) -> Attempt:
        return self.request.id, self.request.attempt

    def is_of(self, request: str, attempt: int) -> bool:
        """Whether it is this request, up to this attempt."""
        return self.request.id == request and self.request.attempt <= attempt

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def num_ahead(self) -> int:
        """Tokens that are to be run before the next one can be sampled."""
        return self.num_tokens - self.prefix

    def advance(self, ran: Chunk | Decode) -> None:
        """Its tokens have KV now."""
        if isinstance(ran, Decode):
            self.prefix += 1
            return
        self.prefix += len(ran.tokens)
        if ran.sampling is None:
            self.promise.chunk_ran()

    def emit(self, token: int, now: float) -> FinishReason | None:
        """A token more; why the output ends with it, if it does."""
        self.output.append(token)
        self.promise.emitted(now, len(self.output))
        return self.request.finish(len(self.output) - 1, token)

    def has_place(self, block_size: int) -> bool:
        """For the K and V of its next token."""
        return self.prefix < len(self.pairs) * block_size

    @property
    def decodes(self) -> bool:
        """Whether its next token is one step away; a prompt with so much left is as short."""
        return self.num_ahead == 1 and len(self.output) > len(self.request.emitted)

    def work(self, chunk: int) -> Work:
        """Until its next due, where prompts run in chunks of this size."""
        return Work(tokens=self.promise.tokens_due) if self.decodes else Work(self.num_ahead, chunk)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Of prompt and output together."""
        prompt = len(self.request.prompt)
        if start >= prompt:
            return tuple(self.output[start - prompt : end - prompt])
        return self.request.prompt[start:end] + tuple(self.output[: max(0, end - prompt)])
