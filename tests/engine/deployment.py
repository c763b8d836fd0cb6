"""Real cores, real engines and a real arena, in one process: each step claims how long it took."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.core import Fold, FoldKv, Request, Role, ServiceClass, WorkerLimits, units_for
from alignedserve.cost.fit import OnlineCost
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import Capture
from alignedserve.executor.hands import EngineHands
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.kvpool.state import PoolCore
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import (
    Command,
    CopyIn,
    CopyOut,
    ReceiveKv,
    Send,
    SendKv,
    Transfer,
    Work,
)
from alignedserve.protocol.events import Event, KvReceived, KvSent, MemberJoined, Received, StepDone
from alignedserve.protocol.extents import Extents, PageBytes
from alignedserve.protocol.form_orders import CopySlots
from alignedserve.protocol.messages import ROUTER, Member, Prefill, Tokens
from alignedserve.scheduling.policy import Policy
from alignedserve.transport.transport import Post, ThroughTheArena
from alignedserve.worker.setup import WorkerSetup
from tests.engine.driver import PLENTY, prompt_of, spoil
from tests.samples import POOL_MEMBER, member, request, slot_copies

BLOCK, PAGE, BLOCKS, PAGES = 4, 8, 14, 60
LIMITS = WorkerLimits(BLOCKS, BLOCK, PAGE, max_step_tokens=32, max_batch=8)
STEP_S = 0.01


Ends = tuple[str, str, int]  # names a transfer: its two holders, and its number


class Beside(ThroughTheArena):
    """Copy from the cache of one worker to the cache of another. A transfer ends when both ends have begun it."""

    address = "beside"

    def __init__(self, me: str, cache: torch.Tensor, sends: dict[Ends, Any], receives: dict[Ends, Any]) -> None:
        """Share `sends` and `receives`, which hold the transfers that all workers have begun."""
        self._me, self._cache, self._sends, self._receives = me, cache, sends, receives

    def start(self, transfer: Transfer, post: Post) -> None:
        if isinstance(transfer, SendKv):
            ends = self._me, transfer.to, transfer.number
            self._sends[ends] = transfer, self._cache[:, _halves(transfer.blocks)].clone(), post
        else:
            ends = transfer.source, self._me, transfer.number
            self._receives[ends] = transfer, self._cache, post
        if ends in self._sends and ends in self._receives:
            self._end(*self._sends.pop(ends), *self._receives.pop(ends))

    def _end(
        self, sent: SendKv, read: torch.Tensor, sender: Post, received: ReceiveKv, cache: torch.Tensor, receiver: Post
    ) -> None:
        intact = sent.tokens == received.tokens
        if intact:
            used = 2 * units_for(len(sent.tokens), BLOCK)  # either end may have spare blocks for longer prefixes
            cache[:, _halves(received.blocks)[:used]] = read[:, :used]
        sender(KvSent(sent.number, sent.to, ok=True))
        receiver(KvReceived(received.number, received.source, intact))


def _halves(blocks: Sequence[int]) -> list[int]:
    return [half for block in blocks for half in (2 * block, 2 * block + 1)]


@dataclass
class Deployment:
    """A deployment of several members in one process; their messages to the router and the owner end here.
    Each member does one thing at a time, and the members take turns."""

    cores: dict[str, Any]
    hands: dict[str, EngineHands]
    outputs: dict[str, list[int]] = field(default_factory=dict)
    work: dict[str, deque[Command]] = field(default_factory=dict)
    late_turns: int = 0  # after which copies beside steps are done
    aside: deque[tuple[float, str, Command]] = field(default_factory=deque)  # those copies, and when each is done
    now: float = 0.0
    num_folds: int = 0
    num_folded_out: int = 0  # copies to the pool of requests that had folded
    num_sent: int = 0  # requests whose KV went from worker to worker
    slot_copies: Counter[str] = field(default_factory=Counter)  # tokens, by what happened to their slots
    num_without_slots: int = 0  # requests that went back to the pool with some of their tokens from the host

    @property
    def decodes(self) -> DecodeCore:
        core = self.cores["decode-0"]
        assert isinstance(core, DecodeCore)
        return core

    def asks(self, request: Request) -> None:
        self.outputs[request.id] = []
        to = "prefill-0" if "prefill-0" in self.cores else "decode-0"
        goes_on = "decode-0" if isinstance(self.cores[to], DecodeCore) and to != "decode-0" else ""
        self.tell(to, Received(ROUTER, Prefill(request, goes_on), 1))

    def tell(self, to: str, event: Event | Exception) -> None:
        said = deque([(to, event)])
        while said:
            by, event = said.popleft()
            for command in self.cores[by].handle(event, self.now):
                match command:
                    case Send(receiver, message) if receiver in self.cores:
                        said.append((receiver, Received(by, message, 1)))
                    case Send(message=Tokens(outputs)):
                        for output in outputs:
                            assert output.index == len(self.outputs[output.request])
                            self.outputs[output.request] += output.tokens
                    case command if isinstance(command, Work | Transfer):
                        self.num_folds += isinstance(command, FoldKv)
                        self.num_sent += isinstance(command, SendKv) and bool(command.blocks)
                        if isinstance(command, CopyOut):
                            self.num_folded_out += len({*command.blocks}) < len(command.blocks)
                        if isinstance(command, CopySlots):
                            self.slot_copies += slot_copies(command)
                            self.num_without_slots += bool(command.saved)
                        self.work.setdefault(by, deque()).append(command)

    def works(self, turns: int) -> None:
        for _ in range(turns):
            self.now += 0.01
            while self.aside and self.aside[0][0] <= self.now:
                _, name, copy = self.aside.popleft()
                self._does(name, copy)
            for name, work in list(self.work.items()):
                if not work:
                    continue
                if isinstance(work[0], SendKv | ReceiveKv):
                    self.hands[name].begin_aside(work.popleft(), partial(self.tell, name))
                elif self.late_turns and isinstance(work[0], CopyIn | CopyOut) and work[0].aside:
                    self.aside.append((self.now + 0.01 * self.late_turns, name, work.popleft()))
                else:
                    self._does(name, work.popleft())

    def _does(self, name: str, work: Command) -> None:
        if (event := self.hands[name].perform(work)) is not None:
            self.tell(name, replace(event, seconds=STEP_S) if isinstance(event, StepDone) else event)

    @property
    def is_idle(self) -> bool:
        return not any(self.work.values()) and not self.aside


@contextmanager
def deployed(
    folder: Path,
    topology: str,
    policy: Policy,
    directory: Path,
    cost: OnlineCost | None = None,
    direct: bool = False,
    prefill_blocks: int = BLOCKS,
    pages: int = PAGES,
    look_ahead: int = 0,
    kv_dtype: KvDtype = KvDtype.AUTO,
    reach: int | None = None,
    fold: Fold | None = None,
    blocks: int = BLOCKS,
    capture: Capture | None = None,
    copies_beside: bool = False,
    lends: bool = False,
) -> Iterator[Deployment]:
    """Make the deployment, with the arena in the directory, or no pool where there are no pages; `cost` is the decode
    worker's cost model, and `blocks` are its; `direct`: from device to device; `reach`: the window of all layers; and
    `fold` of some. Where there is a `capture`, all workers replay their decode steps; with `copies_beside` copies from
    the pool are late by some steps; where it `lends`, the prefill worker decodes, too."""
    limits = replace(LIMITS, num_blocks=blocks, reach=reach, fold=fold)
    setup = WorkerSetup(limits, policy, cost, root=b"model", direct=direct, look_ahead=look_ahead)
    setup = replace(setup, copies_beside=copies_beside)
    cores: dict[str, Any] = {"decode-0": decode_core(setup)}
    if topology == "1+1":
        limits = replace(limits, num_blocks=prefill_blocks)
        of_prefill = replace(setup, limits=limits, cost=None)
        cores["prefill-0"] = decode_core(of_prefill) if lends else PrefillCore(replace(of_prefill, look_ahead=0))
    path = directory / "arena"
    num_blocks = {"decode-0": blocks, "prefill-0": prefill_blocks}
    engines = {
        name: Engine(
            folder,
            num_blocks=num_blocks[name],
            block_size=BLOCK,
            dtype="float32",
            kv_dtype=kv_dtype,
            has_graphs=capture is not None,
        )
        for name in cores
    }
    places, begun = policy.block_use.num_on_host(blocks * BLOCK), (dict[Ends, Any](), dict[Ends, Any]())
    hands = {
        name: EngineHands(
            *(engine, path, PAGE, True),
            transport=Beside(f"{name}.1", engine.cache, *begun) if direct else None,
            num_on_host=places,
        )
        for name, engine in engines.items()
    }
    for engine in engines.values():
        if capture is not None:
            tokens = limits.max_step_tokens
            engine.capture(limits.max_batch, capture, lambda: PLENTY, 0, most_tokens=tokens)
        spoil(engine)
    made = Deployment(cores, hands, late_turns=3 if copies_beside else 0)
    with ExitStack() as arenas:
        if pages:
            extents, sizes = _pages(engines["decode-0"], pages)
            cores["pool-0"] = PoolCore(extents, BLOCK, policy)
            arena = Arena.create(path, pages=extents, payload_bytes=sizes, page_size=PAGE, incarnation=1)
            arenas.enter_context(closing(arena))
            for name, worker_hands in hands.items():
                worker_hands.meet(POOL_MEMBER)
                for joined in (POOL_MEMBER, *(_worker(of, lends) for of in hands if of != name)):
                    if direct or joined is POOL_MEMBER:
                        made.tell(name, MemberJoined(joined))
                if lends:
                    made.tell("pool-0", MemberJoined(_worker(name, lends)))
        yield made
        for worker_hands in hands.values():
            worker_hands.part_from(POOL_MEMBER)


def _worker(name: str, lends: bool) -> Member:
    worker = replace(member(name), transport="beside")
    return replace(worker, role=Role.DECODE, lends=True) if lends and name.startswith("prefill") else worker


def _pages(engine: Engine, pages: int) -> tuple[Extents, PageBytes]:
    kept, config = engine.kv_dtype, engine.config
    return Extents(pages), PageBytes(config.kv_bytes(PAGE, "float32", kept))


def asked(deployment: Deployment, seed: int) -> list[Request]:
    """Send far more requests than fit at once, every third a chat, and return them when all have ended."""
    random, asked = Random(seed), list[Request]()
    for number in range(14):
        service = ServiceClass.RT if number % 3 == 2 else ServiceClass.BE
        new_request = request(f"r{number}", max_tokens=random.randint(4, 24))
        prompt = prompt_of(number, random.randint(1, 14))
        asked.append(replace(new_request, prompt=prompt, stop_tokens=(), service=service, arrival_at=deployment.now))
        deployment.asks(asked[-1])
        deployment.works(random.randint(0, 6))
    deployment.works(2000)
    assert deployment.is_idle
    return asked
