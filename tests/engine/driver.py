"""A planner of the simplest kind: requests with random block pairs, and the plans that run them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from alignedserve.core import Adapter, CacheKind, Chunk, Decode, Sampling, StepPlan
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import Step
from tests.models import VOCAB

GREEDY = Sampling()
PLENTY = 1 << 40  # free bytes, for the capture of steps


def prompt_of(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=tokens))


def spoil(engine: Engine) -> None:
    """Fill the cache with NaN, which shows if a request reads places that were not written for it."""
    engine.cache.view(torch.uint8).fill_(0xFF)  # NaN in every float, and in the scales of int8


@dataclass
class Live:
    """A running request; all its tokens but the last output token have KV once the prompt is computed."""

    name: str
    prompt: tuple[int, ...]
    pairs: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    done: int = 0  # tokens of the prompt that are computed
    from_right: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()  # only for a request that keeps hidden vectors: its blocks, instead of pairs
    adapter: Adapter | None = None

    @property
    def kind(self) -> CacheKind:
        return CacheKind.HIDDEN if self.blocks else CacheKind.KV

    def chunk(self, size: int, sampling: Sampling = GREEDY) -> Chunk:
        tokens = self.prompt[self.done : self.done + size]
        is_last = self.done + len(tokens) == len(self.prompt)
        chunk = Chunk(
            self.name,
            tokens,
            self.done,
            self.pairs,
            sampling if is_last else None,
            from_right=self.from_right,
            kind=self.kind,
            blocks=self.blocks,
            adapter=self.adapter,
        )
        self.done += len(tokens)
        return chunk

    def decode(self, sampling: Sampling = GREEDY) -> Decode:
        return self.decode_ahead(self.output[-1], 0, sampling)

    def decode_ahead(self, token: int | None, ahead: int, sampling: Sampling = GREEDY) -> Decode:
        """Return the step that comes `ahead` steps after the newest known result."""
        index = len(self.output) + ahead
        start = len(self.prompt) + index - 1
        decode = Decode(self.name, token, start, self.pairs, sampling, index, from_right=self.from_right)
        return replace(decode, kind=self.kind, blocks=self.blocks, adapter=self.adapter)

    @property
    def in_prompt(self) -> bool:
        return self.done < len(self.prompt)


class Driver:
    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.steps = 0
        spoil(engine)
        self._free = self.random.sample(range(engine.num_pairs), engine.num_pairs)
        self._halves: list[int] = []  # free halves of pairs that are cut in two

    def units_for(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._free.pop() for _ in range(-(-tokens // self.engine.block_size)))

    def start(self, name: str, prompt: Sequence[int], max_tokens: int) -> Live:
        return Live(name, tuple(prompt), self.units_for(len(prompt) + max_tokens))

    def start_either_way(self, name: str, prompt: Sequence[int], max_tokens: int) -> Live:
        """Start a request, with some of its pairs filled from the right."""
        live = self.start(name, prompt, max_tokens)
        live.from_right = tuple(pair for pair in live.pairs if self.random.random() < 0.5)
        return live

    def start_hidden(self, name: str, prompt: Sequence[int], max_tokens: int) -> Live:
        """Start a request in single blocks; the other half of a pair may belong to another request."""
        count = -(-(len(prompt) + max_tokens) // self.engine.block_size)
        while len(self._halves) < 2 * count:
            pair = self._free.pop()
            self._halves += [2 * pair, 2 * pair + 1]
        self.random.shuffle(self._halves)
        return Live(name, tuple(prompt), (), blocks=tuple(self._halves.pop() for _ in range(count)))

    def step(self, *parts: Chunk | Decode) -> dict[str, int]:
        self.steps += 1
        chunks = tuple(part for part in parts if isinstance(part, Chunk))
        decodes = tuple(part for part in parts if isinstance(part, Decode))
        result = self.engine.step(StepPlan(self.steps, chunks, decodes))
        assert result.number == self.steps
        last_chunks = [chunk.request for chunk in chunks if chunk.sampling is not None]
        assert [request for request, _ in result.tokens] == last_chunks + [decode.request for decode in decodes]
        return dict(result.tokens)

    def run(self, *lives: Live, parts: Sequence[Chunk | Decode]) -> None:
        sampled = self.step(*parts)
        for live in lives:
            if live.name in sampled:
                live.output.append(sampled[live.name])

    def prefill(self, live: Live, sizes: Sequence[int] = ()) -> None:
        """Prefill in chunks of these sizes, and the rest at once."""
        for size in (*sizes, len(live.prompt)):
            if live.in_prompt:
                self.run(live, parts=[live.chunk(size)])

    def generate(self, live: Live, tokens: int) -> list[int]:
        """Decode until the request has this many output tokens."""
        while len(live.output) < tokens:
            self.run(live, parts=[live.decode()])
        return live.output


class Replays:
    """Stands for a GPU's graphs: a captured step is the same function, which runs again on the same buffers."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # of the replayed steps

    def __call__(self, step: Step) -> Step:
        step()  # inputs that the step keeps from this run must be refilled before a replay

        def replay() -> torch.Tensor:
            logits = step()
            self.sizes.append(len(logits))
            return logits

        return replay
