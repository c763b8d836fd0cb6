"""The modelled engine: how long its work takes, which tokens it samples, and KV whose errors it notices.

A token depends on the request's seed and prompt and on the token's index, never on the batch or on what happened
before. `ModelledHands` model only that. `CheckedHands` keep a tag in each slot in place of K and V: the hash of all
tokens of the request up to the slot's own. So a step sees at once whether its prefix lies where the plan says.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from alignedserve.core import (
    POOLED,
    Chunk,
    Decode,
    Draw,
    FoldKv,
    History,
    Logprob,
    Request,
    Role,
    StepPlan,
    StepResult,
    WorkerLimits,
)
from alignedserve.cost.trials import NOBODY
from alignedserve.lab.loads.workload.tape import STOP, VOCABULARY
from alignedserve.lab.simulator.machines.transfers import SimulatedTransfers
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, ReceiveKv, RunStep, SendKv
from alignedserve.protocol.events import CopiedIn, CopiedOut, Event, PageCompressed, StepDone
from alignedserve.protocol.extents import Extents, PageKind
from alignedserve.protocol.form_orders import CompressPage, CopySlots, ProjectKv
from alignedserve.protocol.messages import Member
from alignedserve.protocol.page_names import chained_hashes

_EMPTY = -1  # the tag of a slot that was never written
_HIDDEN = 1 << 62  # the bit that differs between the tags of a token's hidden vector and of its K and V

Tags = list[int]


class WrongKV(Exception):
    """A step or a copy from which a real engine would have computed nonsense, or which it would have refused."""


class Timing(Protocol):
    """The durations of a worker's work, in seconds."""

    def step(self, plan: StepPlan) -> float: ...

    def work(self, command: Command) -> float:
        """Return the time of work that is no step; raise a TypeError where no worker does it."""


@dataclass(frozen=True)
class Costs:
    """The timing of no real device: plain numbers for tests of other things than time."""

    step_s: float = 4e-3
    token_s: float = 2e-5  # each token that runs
    prefix_token_s: float = 2e-7  # each token that is attended to
    page_s: float = 1e-4  # each page that is copied
    sent_token_s: float = 1e-6  # each token whose KV is sent to another device
    hidden_token_s: float = 0.0  # each token whose K and V are computed from hidden vectors

    def step(self, plan: StepPlan) -> float:
        tokens = sum(len(chunk.tokens) for chunk in plan.chunks) + len(plan.decodes)
        prefixes = sum(part.start - part.kv.dropped for part in plan.parts)
        hidden = sum(part.start for part in plan.parts if part.kv.form)
        attended = self.prefix_token_s * prefixes + self.hidden_token_s * hidden
        return self.step_s + self.token_s * tokens + attended

    def work(self, command: Command) -> float:
        match command:
            case CopyOut() | CopyIn():
                return self.page_s * len(command.pages)
            case CopySlots():
                return self.token_s * (len(command.checkpoints) + len(command.restores) + len(command.moves))
            case FoldKv():
                return self.token_s * len(command.folds)
            case ProjectKv():
                return self.hidden_token_s * command.num_tokens
            case CompressPage():
                return self.page_s
            case SendKv():
                return self.sent_token_s * len(command.tokens)
        raise TypeError(f"a worker cannot begin {command}")


@dataclass(frozen=True)
class TokenStory:
    """The tokens of a request from prompt to end, whatever happens on the way."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]  # up to the stop token or the limit
    tokens: tuple[int, ...]  # prompt and output
    tags: tuple[int, ...] = ()  # a tag for each token, where KV is checked


def logprob_of(place: int) -> Logprob:
    """Return the modelled log-probability at this place of prompt or output; no two places have the same."""
    return Logprob(-1.0 - place)


def vector_of(prompt: Sequence[int]) -> bytes:
    """Return the modelled vector of a prompt."""
    return crc32(array("q", prompt).tobytes()).to_bytes(4, "little")


def story_from(request: Request, length: int, tagged: bool = True) -> TokenStory:
    """Build the story of a request with `length` tokens of output, or fewer by the request's limit."""
    chain = crc32(array("q", request.prompt).tobytes(), request.sampling.seed)
    output = [1 + (chain + 7919 * index) % (VOCABULARY - 1) for index in range(min(length, request.max_tokens))]
    if length <= request.max_tokens:
        output[-1] = STOP
    tokens = (*request.prompt, *output)
    return TokenStory(request.prompt, tuple(output), tokens, _tags(request.kv_salt, tokens) if tagged else ())


def _tags(salt: bytes, tokens: Sequence[int]) -> tuple[int, ...]:
    tag, tags = crc32(salt), []
    for token in tokens:
        tag = hash((tag, token))
        tags.append(tag)
    return tuple(tags)


@dataclass
class _TaggedPage:
    token_hash: int | None  # from its header; None while the page is being written
    length: int
    tags: Tags


class TaggedArena:
    """The arena of one life of the pool, with tags in place of KV."""

    def __init__(self, page_size: int, extents: Extents) -> None:
        self.page_size, self._extents = page_size, extents
        self.pages: dict[int, _TaggedPage] = {}
        self._kinds: dict[int, PageKind] = {}  # extent -> kind of its pages, once a page was written there

    def write(self, pages: Mapping[int, _TaggedPage]) -> None:
        """Write pages; in their extents, pages of another kind are lost."""
        for page, content in pages.items():
            extent, _, kind = self._extents.place(page)
            before = self._kinds.get(extent, kind)
            if before is not kind:
                for old in self._extents.pages(extent, before):
                    self.pages.pop(old, None)
            self._kinds[extent] = kind
            self.pages[page] = content

    def kind_of(self, page: int) -> PageKind:
        return self._extents.kind_of(page)


class ModelledHands:
    """A worker's hands that check nothing: they take the plan for right."""

    def __init__(self, stories: Mapping[str, TokenStory], timing: Timing) -> None:
        self._stories, self._timing = stories, timing

    def meet(self, member: Member) -> None: ...

    def part_from(self, member: Member) -> None: ...

    def perform(self, command: Command) -> None:
        raise TypeError(f"a worker cannot perform {command}")

    def begin(self, command: Command) -> float:
        """Return the seconds that the work takes."""
        return self._timing.step(command.plan) if isinstance(command, RunStep) else self._timing.work(command)

    def finish(self, command: Command, seconds: float) -> Event | None:
        match command:
            case RunStep(plan):
                return StepDone(self._step(plan), seconds)
            case CopyOut():
                self._copy_out(command)
                return CopiedOut(command.number)
            case CopyIn():
                return CopiedIn(command.number, self._copy_in(command))
            case CopySlots():
                self._copy_slots(command)
                return None
            case FoldKv(folds):
                self._fold(folds)
                return None
            case ProjectKv():
                self._project(command)
                return None
            case CompressPage(number, pool):
                return PageCompressed(pool, number, self._compress(command), seconds)
        raise TypeError(f"a worker cannot finish {command}")

    def transfer(
        self, command: SendKv | ReceiveKv, transfers: SimulatedTransfers, me: str, post: Callable[[Event], None]
    ) -> None:
        if isinstance(command, SendKv):
            transfers.send(me, command, self._timing.work(command), self, post)
        else:
            transfers.receive(me, command, self, post)

    def read_kv(self, sends: SendKv) -> object:
        return None

    def begin_receiving(self, receives: ReceiveKv) -> None: ...

    def write_kv(self, receives: ReceiveKv, content: object) -> None: ...

    def _step(self, plan: StepPlan) -> StepResult:
        stories, sampled, asks = self._stories, [], False
        for part in (*plan.parts, *plan.draws):
            sampling = part.sampling
            if sampling is not None:
                request = part.request
                try:
                    token = stories[request].output[part.index]
                except LookupError:  # a core that plans ahead may ask for a token after the end: any will do
                    token = STOP
                sampled.append((request, token))
                asks |= sampling.logprobs is not None
        if plan.chunks or asks:
            return _result(plan, sampled, stories)
        return StepResult(plan.number, tuple(sampled))

    def _copy_out(self, command: CopyOut) -> None: ...

    def _copy_in(self, command: CopyIn) -> bool:
        return True

    def _copy_slots(self, command: CopySlots) -> None: ...

    def _fold(self, folds: Sequence[Sequence[int]]) -> None: ...

    def _project(self, command: ProjectKv) -> None: ...

    def _compress(self, command: CompressPage) -> bool:
        return True


def _result(plan: StepPlan, sampled: Sequence[tuple[str, int]], stories: Mapping[str, TokenStory]) -> StepResult:
    result = StepResult(plan.number, tuple(sampled))
    pooled = [chunk.request for chunk in plan.chunks if chunk.pooling is not None]
    if pooled:
        result.tokens += tuple((request, POOLED) for request in pooled)
        result.vectors = tuple((request, vector_of(stories[request].prompt)) for request in pooled)
    parts = (*plan.parts, *plan.draws)
    asked = [part for part in parts if part.sampling is not None and part.sampling.logprobs is not None]
    if asked:
        result.logprobs = tuple([(part.request, logprob_of(part.index)) for part in asked])
    scored = [(chunk, chunk.scoring.tokens) for chunk in plan.chunks if chunk.scoring is not None]
    if scored:
        result.prompt_logprobs = tuple(
            (chunk.request, tuple(logprob_of(chunk.start + 1 + place) for place in range(len(tokens))))
            for chunk, tokens in scored
        )
    return result


def _fits(history: History | None, story: TokenStory, index: int) -> bool:
    known = history is not None and (history.prompt, tuple(history.output[:index]))
    return known == (story.prompt, story.output[:index])


def _k_halves(blocks: Sequence[int]) -> list[int]:
    return [2 * block if block >= 0 else ~(2 * ~block) for block in blocks]


def _both_halves(blocks: Sequence[int]) -> list[int]:
    return [half for block in blocks for half in (2 * block, 2 * block + 1)]


class CheckedHands(ModelledHands):
    """A worker's hands that notice wrong KV; `arena` returns the arena of a pool, or None if that pool has gone."""

    def __init__(
        self,
        stories: Mapping[str, TokenStory],
        timing: Timing,
        limits: WorkerLimits,
        arena: Callable[[Member], TaggedArena | None],
    ) -> None:
        super().__init__(stories, timing)
        self._sampled: dict[str, int] = {}  # request -> token, from the last step
        self._limits, self._block_size = limits, limits.block_size
        self._halves: list[Tags] = [[_EMPTY] * limits.block_size for _ in range(2 * limits.num_blocks)]
        self._folded: dict[int, Tags] = {}  # block -> what layers without a window keep there of all that was folded
        self._places: dict[int, int] = {}  # place of a saved token -> its tag
        self._saved: dict[int, tuple[tuple[int, int], ...]] = {}  # by the number of the copy that reads these places
        self._find_arena = arena
        self._arena: TaggedArena | None = None
        self._pool = ""  # its holder

    def meet(self, member: Member) -> None:
        if member.role is Role.POOL:
            self._arena, self._pool = self._find_arena(member), member.holder

    def part_from(self, member: Member) -> None:
        if member.role is Role.POOL:
            self._arena = None

    def begin(self, command: Command) -> float:
        """Begin the work. What it writes beside other work holds neither old nor new content until it has finished."""
        if isinstance(command, CopyOut) and (arena := self._current_arena(command.pool)) is not None:
            arena.write(dict.fromkeys(command.pages, _TaggedPage(None, 0, [])))
        if isinstance(command, CopyIn) and command.aside:
            self._write(self._copied_to(command), 0, [_EMPTY] * (len(self._copied_to(command)) * self._block_size))
        if isinstance(command, CompressPage) and (arena := self._current_arena(command.pool)) is not None:
            arena.write({command.into: _TaggedPage(None, 0, [])})
        return super().begin(command)

    def _current_arena(self, pool: str) -> TaggedArena | None:
        return self._arena if pool == self._pool else None

    # --- Steps

    def _step(self, plan: StepPlan) -> StepResult:
        written: set[tuple[int, int]] = set()
        sampled = []
        for chunk in plan.chunks:
            self._run(chunk, chunk.tokens, written)
            if chunk.sampling is not None:
                sampled.append((chunk.request, self._sample(chunk, chunk.start + len(chunk.tokens))))
            self._check_scoring(chunk)
            self._check_pooling(chunk)
        for decode in plan.decodes:
            token = self._sampled.get(decode.request) if decode.token is None else decode.token
            if token is None:
                raise WrongKV(f"{decode.request} decodes after a token that the step before has not sampled")
            self._run(decode, (token,), written)
            sampled.append((decode.request, self._sample(decode, decode.start + 1)))
        sampled += [(draw.request, self._draw(draw, plan.chunks)) for draw in plan.draws]
        self._sampled = dict(sampled)
        return _result(plan, sampled, self._stories)

    def _run(self, part: Chunk | Decode, tokens: Sequence[int], written: set[tuple[int, int]]) -> None:
        if part.request.startswith(NOBODY):
            self._spoil(part)
            return
        request, start, is_hidden = part.request, part.start, bool(part.kv.form)
        halves = _both_halves(part.kv.blocks) if is_hidden else _k_halves(part.kv.blocks)
        story, end, dropped = self._stories[request], start + len(tokens), part.kv.dropped
        lacking = self._check_folded(part, story) if self._limits.fold is not None and dropped else dropped
        if lacking == dropped and (dropped > self._limits.unread(start) or dropped % self._block_size):
            raise WrongKV(f"{request} lacks its first {dropped} tokens, and some of them are read at {start}")
        if not tokens or story.tokens[start:end] != tuple(tokens):
            raise WrongKV(f"{request} runs tokens from {start} on that are not its own")
        if end - dropped > len(halves) * self._block_size:
            raise WrongKV(f"{request} has {len(part.kv.blocks)} blocks, too few for {end - dropped} tokens")
        held = self._read(halves, start - dropped, is_hidden)[lacking - dropped :]
        if held != list(story.tags[lacking:start]):
            raise WrongKV(f"the blocks of {request} do not hold its tokens {lacking} to {start}")
        touched = {self._slot(halves, at) for at in range(start - dropped, end - dropped)}
        if touched & written:
            raise WrongKV(f"{request} writes to a slot that another request of the step writes to")
        written |= touched
        self._write(halves, start - dropped, story.tags[start:end], is_hidden)

    def _check_folded(self, part: Chunk | Decode, story: TokenStory) -> int:
        """Check what layers without a window read in folded blocks; return how many tokens those hold."""
        fold, size = self._limits.fold, self._block_size
        assert fold is not None
        tokens = fold.folded(part.kv.dropped)
        if tokens > fold.foldable(part.start, size) or tokens % (size * fold.blocks):
            raise WrongKV(f"{part.request} has folded {tokens} tokens, and some of them are read at {part.start}")
        held = [
            tag for block in part.kv.blocks[: tokens // (size * fold.blocks)] for tag in self._folded.get(block, ())
        ]
        if held != list(story.tags[:tokens]):
            raise WrongKV(f"the folded blocks of {part.request} do not hold its first {tokens} tokens")
        return tokens

    def _spoil(self, part: Chunk | Decode) -> None:
        """Write what no request has: a trial runs on blocks that are nobody's."""
        halves = _k_halves(part.kv.blocks)
        self._write(halves, 0, [_EMPTY] * (len(halves) * self._block_size))

    def _draw(self, draw: Draw, chunks: Sequence[Chunk]) -> int:
        chunk = next((chunk for chunk in chunks if chunk.request == draw.source and chunk.sampling is not None), None)
        prompt = self._stories[draw.request].prompt
        if chunk is None or self._stories[draw.source].prompt != prompt:
            raise WrongKV(f"{draw.request} draws from a prompt of {draw.source} that is not its own")
        return self._sample(draw, chunk.start + len(chunk.tokens))

    def _sample(self, part: Chunk | Decode | Draw, num_tokens: int) -> int:
        if part.request.startswith(NOBODY):
            return STOP
        story = self._stories[part.request]
        if num_tokens != len(story.prompt) + part.index:
            raise WrongKV(f"token {part.index} of {part.request} is sampled after {num_tokens} tokens")
        if part.sampling is not None and part.sampling.edits_logits and not _fits(part.history, story, part.index):
            raise WrongKV(f"token {part.index} of {part.request} is sampled with a history that is not its own")
        # a core that plans ahead may ask for a token after the end: any will do
        return story.output[part.index] if story is not None and part.index < len(story.output) else STOP

    def _check_scoring(self, chunk: Chunk) -> None:
        after = chunk.start + 1
        if chunk.scoring is not None:
            tokens, story = chunk.scoring.tokens, self._stories[chunk.request]
            most = len(chunk.tokens) - (chunk.sampling is not None)
            if len(tokens) != most or tokens != story.prompt[after : after + len(tokens)]:
                raise WrongKV(f"{chunk.request} has tokens scored from {after} on that are not its own")

    def _check_pooling(self, chunk: Chunk) -> None:
        if chunk.pooling is None:
            return
        start, end, length = chunk.start, chunk.start + len(chunk.tokens), len(self._stories[chunk.request].prompt)
        if end != length or (start and chunk.pooling.is_whole):
            raise WrongKV(f"a vector of {chunk.request} is made of its tokens from {start} to {end} of {length}")

    # --- Transfers

    def read_kv(self, sends: SendKv) -> object:
        return self._read(_k_halves(sends.blocks), len(sends.tokens))

    def begin_receiving(self, receives: ReceiveKv) -> None:
        halves = _k_halves(receives.blocks)
        self._write(halves, 0, [_EMPTY] * (len(halves) * self._block_size))

    def write_kv(self, receives: ReceiveKv, content: object) -> None:
        halves, end = _k_halves(receives.blocks), len(receives.tokens)
        if any(tag != _EMPTY for tag in self._read(halves, len(halves) * self._block_size)):
            raise WrongKV(f"the blocks that transfer {receives.number} is received into were written to meanwhile")
        assert isinstance(content, list)
        self._write(halves, 0, content[:end])

    # --- Slots and pages

    def _read(self, halves: Sequence[int], end: int, is_hidden: bool = False) -> Tags:
        tags: Tags = []
        for half in halves[: -(-end // self._block_size)]:
            tags += reversed(self._halves[~half]) if half < 0 else self._halves[half]
        return [tag ^ _HIDDEN for tag in tags[:end]] if is_hidden else tags[:end]

    def _slot(self, halves: Sequence[int], at: int) -> tuple[int, int]:
        """Return the half of a token, and its offset in the half."""
        half, offset = halves[at // self._block_size], at % self._block_size
        return (~half, self._block_size - 1 - offset) if half < 0 else (half, offset)

    def _write(self, halves: Sequence[int], start: int, tags: Sequence[int], is_hidden: bool = False) -> None:
        """Write tags. KV takes both halves of a block; only the half of K is read later."""
        for at, tag in enumerate(tags, start):
            half, offset = self._slot(halves, at)
            self._folded.pop(half // 2, None)
            self._halves[half][offset] = tag ^ _HIDDEN if is_hidden else tag
            if not is_hidden:
                self._halves[half + 1][offset] = _EMPTY

    def _copy_out(self, command: CopyOut) -> None:
        arena, tokens = self._current_arena(command.pool), command.tokens
        if arena is None:
            return
        halves, size = _k_halves(command.blocks), arena.page_size
        tags = self._read(halves, len(tokens))
        for token, place in self._saved.pop(command.number, ()):
            tags[token] = self._places[place]
        first = command.start // size
        hashes = chained_hashes(tokens, size)[first:]
        for at, (page, token_hash) in enumerate(zip(command.pages, hashes, strict=True), first):
            page_tags = tags[at * size : (at + 1) * size]
            arena.write({page: _TaggedPage(token_hash, len(page_tags), page_tags)})

    def _copied_to(self, command: CopyIn) -> list[int]:
        return _k_halves(command.blocks[command.start // self._block_size :])

    def _copy_in(self, command: CopyIn) -> bool:
        arena, tokens, halves = self._current_arena(command.pool), command.tokens, self._copied_to(command)
        if command.aside and any(tag != _EMPTY for tag in self._read(halves, len(halves) * self._block_size)):
            raise WrongKV(f"the blocks of copy {command.number} were written to meanwhile")
        if arena is None:
            return False
        size, halves = arena.page_size, _k_halves(command.blocks)
        first = command.start // size
        hashes = chained_hashes(tokens, size)[first:]
        for at, (page, token_hash) in enumerate(zip(command.pages, hashes, strict=True), first):
            read = arena.pages.get(page)
            if read is None or (read.token_hash, read.length) != (token_hash, len(tokens[at * size : (at + 1) * size])):
                return False
            self._write(halves, at * size, read.tags)
        return True

    def _copy_slots(self, command: CopySlots) -> None:
        """Copy slots; all are read before any is written."""
        saved = {place: self._tag_at(slot) for slot, place in command.checkpoints}
        new = {slot: self._places[place] for place, slot in command.restores}
        new |= {target: self._tag_at(source) for source, target in command.moves}
        self._places |= saved
        if command.saved:
            self._saved[command.copy] = command.saved
        for slot, tag in new.items():
            block, offset = divmod(slot, self._block_size)
            self._halves[2 * block][offset], self._halves[2 * block + 1][offset] = tag, _EMPTY

    def _fold(self, folds: Sequence[Sequence[int]]) -> None:
        """Fold blocks; all are read before any is written."""
        held = {into: [tag for block in blocks for tag in self._halves[2 * block]] for into, *blocks in folds}
        for into, tags in held.items():
            self._halves[2 * into] = [_EMPTY] * self._block_size
            self._folded[into] = tags

    def _project(self, command: ProjectKv) -> None:
        tags = self._read(_both_halves(command.kept), command.num_tokens, is_hidden=True)
        if tags != list(self._stories[command.request].tags[: command.num_tokens]):
            raise WrongKV(f"the blocks of {command.request} do not hold its hidden vectors")
        self._write(_k_halves(command.blocks), 0, tags)

    def _tag_at(self, slot: int) -> int:
        block, offset = divmod(slot, self._block_size)
        return self._halves[2 * block][offset]

    def _compress(self, command: CompressPage) -> bool:
        """Return whether the page could be compressed: it is full and intact; by the hash, every eleventh cannot."""
        arena = self._current_arena(command.pool)
        read = None if arena is None else arena.pages.get(command.page)
        if arena is None or read is None or arena.kind_of(command.page) is not PageKind.KV:
            return False
        if read.token_hash is None or read.length != arena.page_size or not read.token_hash % 11:
            return False
        arena.write({command.into: _TaggedPage(read.token_hash, read.length, read.tags)})
        return True
