"""Tests that the answer is that of transformers where prompts wait in the pool, as KV or as int8.

Real cores and engines, simulated frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alignedserve.architectures.families.model_config import ModelConfig, read_config
from alignedserve.config.topology import Topology
from alignedserve.core import Request, Role, Sampling, ServiceClass, Slo, WorkerLimits
from alignedserve.engine.engine import Engine
from alignedserve.executor.hands import EngineHands
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.loads.workload import Arrival
from alignedserve.lab.simulator.machines.transfers import SimulatedTransfers
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import FIRST_ARRIVAL_AT, Settings
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyIn, Deliver, ReceiveKv, RunStep, SendKv
from alignedserve.protocol.events import Event
from alignedserve.protocol.extents import PageBytes
from alignedserve.protocol.form_orders import CompressPage
from alignedserve.protocol.int8_layout import Int8Layout
from alignedserve.protocol.messages import Member
from alignedserve.scheduling.form_rules import Compression
from alignedserve.scheduling.policy import Policy
from tests.engine.driver import prompt_of
from tests.rare import rarely
from tests.reference import Tally, compare

LIMITS = WorkerLimits(num_blocks=60, block_size=4, page_size=8, max_step_tokens=24, max_batch=3)
ALIKE, OUTPUT, REQUESTS, PAGES = 21, 20, 10, 96
FolderOf = Callable[[str], Path]


@dataclass
class Hands:
    """The hands of a real worker; each step claims the duration that the test sets."""

    real: EngineHands
    deployment: Deployment

    def meet(self, member: Member) -> None:
        if member.role is Role.POOL:
            self.deployment.make_arena(member)
        self.real.meet(member)

    def part_from(self, member: Member) -> None:
        self.real.part_from(member)

    def begin(self, command: Command) -> float:
        self.deployment.num_compressed += isinstance(command, CompressPage)
        if isinstance(command, CopyIn):
            self.deployment.copied_in += command.pages
        return 0.01 if isinstance(command, RunStep) else 0.001

    def finish(self, command: Command, seconds: float) -> Event:
        event = self.real.perform(command)
        assert event is not None
        return event

    def perform(self, command: Command) -> None:
        raise TypeError(f"a worker cannot perform {command}")

    def transfer(
        self, command: SendKv | ReceiveKv, transfers: SimulatedTransfers, me: str, post: Callable[[Event], None]
    ) -> None:
        raise TypeError(f"nobody has told this worker of another, for {command}")


class Deployment(Simulation):
    def __init__(self, folder: Path, arena: Path, policy: Policy, dtype: str = "float32") -> None:
        self._folder, self._path, self._dtype = folder, arena, dtype
        self.sizes = page_bytes(read_config(folder), policy, dtype)
        self.outputs: dict[str, list[int]] = {}
        self.num_compressed, self.copied_in = 0, tuple[int, ...]()
        self._made: Arena | None = None
        asked = [Arrival(request, OUTPUT, None) for request in requests()]
        settings = Settings(
            topology=Topology.parse("1+1"),
            limits=LIMITS,
            policy=policy,
            extents=self.sizes.divide(PAGES),
            most_s=300.0,
        )
        super().__init__(settings, asked)

    def make_arena(self, pool: Member) -> None:
        if self._made is None:
            self._made = Arena.create(
                self._path,
                pages=self.sizes.divide(PAGES),
                payload_bytes=self.sizes,
                page_size=LIMITS.page_size,
                incarnation=pool.incarnation,
            )

    def _engine(self) -> Hands:
        engine = Engine(self._folder, num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size, dtype=self._dtype)
        engine.cache.fill_(float("nan"))
        return Hands(EngineHands(engine, self._path, LIMITS.page_size, verify=True), self)

    def deliver(self, command: Deliver) -> None:
        self.outputs.setdefault(command.request, []).extend(command.tokens)
        super().deliver(command)

    def core(self, name: str) -> Any:
        process = self.world.alive(name)
        assert process is not None
        return process.core


def page_bytes(model: ModelConfig, policy: Policy, dtype: str) -> PageBytes:
    tokens = LIMITS.page_size
    int8 = Int8Layout(2 * model.num_layers * model.kv_dim, tokens).size
    return PageBytes(model.kv_bytes(tokens, dtype), int8 if policy.compression is not Compression.OFF else 0)


def requests() -> list[Request]:
    """Return more requests than can decode at once, so that some wait; some share a prefix, and come when the first is
    stored."""
    made = []
    for number in range(REQUESTS):
        alike = prompt_of(number % 2, ALIKE)
        prompt = (*alike, *prompt_of(100 + number, 3 + 5 * number))
        arrival_at = FIRST_ARRIVAL_AT + 0.02 * number
        made.append(
            Request(
                id=f"r{number}",
                owner="gateway-0",
                attempt=0,
                prompt=prompt,
                emitted=(),
                sampling=Sampling(),
                max_tokens=OUTPUT,
                stop_tokens=(),
                service=(ServiceClass.RT, ServiceClass.BE)[number % 2],
                slo=Slo(),
                arrival_at=arrival_at,
            )
        )
    return made


def ran(folder: Path, arena: Path, policy: Policy) -> Deployment:
    deployment = Deployment(folder, arena, policy)
    deployment.run()
    assert {name: len(output) for name, output in deployment.outputs.items()} == {
        f"r{number}": OUTPUT for number in range(REQUESTS)
    }
    for name in ("pool-0", "decode-0", "prefill-0"):
        assert not any(deployment.core(name).held.values())
    return deployment


@pytest.mark.parametrize(
    ("reuse", "name"), [(True, "opt"), (False, "mha-tied"), *map(rarely, ((True, "mha-tied"), (False, "opt")))]
)
def test_answers_are_those_of_transformers(
    name: str,
    reuse: bool,
    tmp_path: Path,
    folder_of: FolderOf,
    reference_of: Callable[[Path], Any],
    tally: Tally,
) -> None:
    deployment = ran(folder_of(name), tmp_path / "arena", Policy(reuse=reuse, helps=False))
    for request in requests():
        label = f"{name}, {request.id}"
        compare(reference_of(folder_of(name)), request.prompt, deployment.outputs[request.id], tally, label)
    prefill = deployment.core("prefill-0")
    assert isinstance(prefill, PrefillCore)
    assert (prefill.seats.num_reused_tokens + prefill.memory.pages.num_shared_tokens > 0) is reuse


@pytest.mark.parametrize("reuse", [True, rarely(False)])
def test_compressed_entries_come_back(reuse: bool, tmp_path: Path, folder_of: FolderOf) -> None:
    policy = Policy(compression=Compression.INT8, reuse=reuse, helps=False)
    deployment = ran(folder_of("mha-tied"), tmp_path / "arena", policy)
    pool, extents = deployment.core("pool-0"), deployment.settings.pool_extents
    assert isinstance(pool, PoolCore)
    assert pool.rewriting.num_rewritten > 0
    assert pool.rewriting.num_refused == 0
    assert deployment.num_compressed >= pool.rewriting.num_rewritten
    assert any(page >= extents.num_pages(extents.first_kind) for page in deployment.copied_in), "int8 was expanded"


def test_without_pressure_auto_compresses_nothing(tmp_path: Path, folder_of: FolderOf) -> None:
    deployment = ran(folder_of("mha-tied"), tmp_path / "arena", Policy(compression=Compression.AUTO))
    assert deployment.num_compressed == 0
