"""A planner of the simplest kind: requests with random blocks, and the plans that run them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from alignedserve.core import Adapter, Chunk, Decode, KvForm, Sampling, StepPlan
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import Step
from alignedserve.kernels.common.reference import Reference
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
    blocks: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    done: int = 0  # tokens of the prompt that are computed
    is_hidden: bool = False  # it keeps hidden vectors, in both halves of its blocks
    adapter: Adapter | None = None

    @property
    def kv(self) -> KvForm:
        return KvForm(self.blocks, form="hidden", in_place=2) if self.is_hidden else KvForm(self.blocks)

    def chunk(self, size: int, sampling: Sampling = GREEDY) -> Chunk:
        tokens = self.prompt[self.done : self.done + size]
        is_last = self.done + len(tokens) == len(self.prompt)
        chunk = Chunk(
            self.name,
            tokens,
            self.done,
            self.kv,
            sampling if is_last else None,
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
        return Decode(self.name, token, start, self.kv, sampling, index, adapter=self.adapter)

    @property
    def in_prompt(self) -> bool:
        return self.done < len(self.prompt)


class Driver:
    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.steps = 0
        spoil(engine)
        self._free = self.random.sample(range(engine.num_blocks), engine.num_blocks)

    def units_for(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._free.pop() for _ in range(-(-tokens // self.engine.block_size)))

    def start(self, name: str, prompt: Sequence[int], max_tokens: int) -> Live:
        return Live(name, tuple(prompt), self.units_for(len(prompt) + max_tokens))

    def start_either_way(self, name: str, prompt: Sequence[int], max_tokens: int) -> Live:
        """Start a request, with some of its blocks filled from the right."""
        live = self.start(name, prompt, max_tokens)
        live.blocks = self.turned(live.blocks)
        return live

    def turned(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return these blocks, half of them to be filled from the right."""
        return tuple(~block if self.random.random() < 0.5 else block for block in blocks)

    def start_hidden(self, name: str, prompt: Sequence[int], max_tokens: int) -> Live:
        """Start a request that is kept as hidden vectors."""
        blocks = self.units_for(-(-(len(prompt) + max_tokens) // 2))
        return Live(name, tuple(prompt), blocks, is_hidden=True)

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


class Drawing(Reference):
    """Kernels whose draws are captured with their step, as Triton's are."""

    captures_draws = True


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
