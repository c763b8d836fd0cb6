"""Chats and other requests on a device that is far too small for them: what they say is what they say alone.

Real cores, real engines and a real arena, in one process. Chats take slots of best-effort requests, which wait, get
them back and go on; the tests assert that all of that happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from alignedserve.commands import Command, CopyIn, CopyOut, CopySlots, RunStep, Send
from alignedserve.core import Request, ServiceClass
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.engine.engine import Engine
from alignedserve.engine_hands import EngineHands
from alignedserve.events import Event, MemberJoined, Received
from alignedserve.kvpool.arena import Arena
from alignedserve.kvpool.state import PoolCore
from alignedserve.messages import ROUTER, Prefill, Tokens
from alignedserve.policy import Choice, Chunking, Layout, Order, Policy, Room
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.running import WorkerLimits
from tests.engine.driver import prompt_of
from tests.reference import Tally, compare
from tests.samples import POOL_MEMBER, request

BLOCK, PAGE, PAIRS, PAGES = 4, 8, 14, 60
LIMITS = WorkerLimits(PAIRS, BLOCK, PAGE, max_step_tokens=32, max_batch=8)
SHARED = Policy(room=Room.GROWING, blocks=Layout.BIDIRECTIONAL)
LITTLE_KEPT = replace(SHARED, checkpoints=0.2)
FCFS = replace(SHARED, order=Order.FCFS, chunking=Chunking.FIXED, selection=Choice.IN_ORDER)


@dataclass
class Deployment:
    """What its members say to the router and the owner ends here. Each works at one thing at a time, all in turn."""

    cores: dict[str, Any]
    hands: dict[str, EngineHands]
    outputs: dict[str, list[int]] = field(default_factory=dict)
    work: dict[str, deque[Command]] = field(default_factory=dict)
    now: float = 0.0
    num_without_slots: int = 0  # requests that went back to the pool, and some of their tokens from the host

    @property
    def decodes(self) -> DecodeCore:
        core = self.cores["decode-0"]
        assert isinstance(core, DecodeCore)
        return core

    def asks(self, one: Request) -> None:
        self.outputs[one.id] = []
        to = "prefill-0" if "prefill-0" in self.cores else "decode-0"
        self.tell(to, Received(ROUTER, Prefill(one), 1))

    def tell(self, to: str, event: Event) -> None:
        said = deque([(to, event)])
        while said:
            by, event = said.popleft()
            for command in self.cores[by].handle(event, self.now):
                match command:
                    case Send(other, message) if other in self.cores:
                        said.append((other, Received(by, message, 1)))
                    case Send(message=Tokens(outputs)):
                        for output in outputs:
                            assert output.index == len(self.outputs[output.request])
                            self.outputs[output.request] += output.tokens
                    case RunStep() | CopyOut() | CopyIn() | CopySlots():
                        self.num_without_slots += isinstance(command, CopyOut) and bool(command.saved)
                        self.work.setdefault(by, deque()).append(command)

    def works(self, turns: int) -> None:
        for _ in range(turns):
            self.now += 0.01
            for name, work in list(self.work.items()):
                if work and (event := self.hands[name].perform(work.popleft())) is not None:
                    self.tell(name, event)

    @property
    def is_idle(self) -> bool:
        return not any(self.work.values())


@pytest.fixture
def deployment(folder: Path, topology: str, policy: Policy, tmp_path: Path) -> Iterator[Deployment]:
    cores: dict[str, Any] = {"decode-0": DecodeCore(LIMITS, policy, root=b"model")}
    if topology == "1+1":
        cores["prefill-0"] = PrefillCore(LIMITS, policy, root=b"model")
    path = tmp_path / "arena"
    engines = {name: Engine(folder, num_pairs=PAIRS, block_size=BLOCK, dtype="float32") for name in cores}
    places = policy.num_places(PAIRS * BLOCK)
    hands = {name: EngineHands(engine, path, PAGE, verify=True, num_places=places) for name, engine in engines.items()}
    for engine in engines.values():
        engine.cache.fill_(float("nan"))  # whoever reads what was not written for it will be seen
    made = Deployment(cores, hands)
    with ExitStack() as arenas:
        if topology == "1+1":
            cores["pool-0"] = PoolCore(PAGES, BLOCK, policy)
            layers, _, _, kv_dim = engines["decode-0"].cache.shape
            size = layers * 2 * PAGE * kv_dim * 4
            arena = Arena.create(path, pages=PAGES, payload_bytes=size, page_size=PAGE, incarnation=1)
            arenas.enter_context(closing(arena))
            for name, one in hands.items():
                one.meet(POOL_MEMBER)
                made.tell(name, MemberJoined(POOL_MEMBER))
        yield made
        for one in hands.values():
            one.part_from(POOL_MEMBER)


@pytest.fixture
def folder(folder_of: Callable[[str], Path], name: str) -> Path:
    return folder_of(name)


# With seeds in which all of it happens.
@pytest.mark.parametrize(
    ("topology", "policy", "name", "seed"),
    [
        ("colocated", SHARED, "gqa-untied", 15),
        ("colocated", LITTLE_KEPT, "opt", 14),
        ("colocated", FCFS, "gqa-untied", 7),
        ("1+1", SHARED, "gqa-untied", 3),
        ("1+1", LITTLE_KEPT, "opt", 3),
    ],
)
def test_what_they_say_is_what_they_say_alone(
    deployment: Deployment, folder: Path, reference_of: Callable[[Path], Any], topology: str, policy: Policy, seed: int
) -> None:
    random, tally, asked = Random(seed), Tally(), list[Request]()
    for number in range(14):
        service = ServiceClass.RT if number % 3 == 2 else ServiceClass.BE
        one = request(f"r{number}", max_tokens=random.randint(4, 24))
        prompt = prompt_of(number, random.randint(1, 14))
        asked.append(replace(one, prompt=prompt, stop_tokens=(), service=service, arrival_at=deployment.now))
        deployment.asks(asked[-1])
        deployment.works(random.randint(0, 6))
    deployment.works(2000)
    assert deployment.is_idle
    for one in asked:
        assert len(deployment.outputs[one.id]) == one.max_tokens
        compare(reference_of(folder), one.prompt, deployment.outputs[one.id], tally, f"{folder.name}, {policy}")
    tally.check()
    held = deployment.decodes.held
    assert (held["requests"], held["pairs"], held["pages"], held["places"]) == (0, 0, 0, 0)
    assert deployment.decodes.shared is not None
    counts = deployment.decodes.shared.counts
    assert counts.num_preempted
    assert counts.num_checkpoints
    assert counts.num_restored
    assert counts.num_moved
    assert deployment.num_without_slots or topology == "colocated"
