"""The length predictor in virtual time: predictions reach the holder of the request, and a restart keeps knowledge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.config.topology import Topology
from alignedserve.core import Estimate
from alignedserve.lab.loads.workload import Workload
from alignedserve.lab.simulator.machines.faults import Kill
from alignedserve.lab.simulator.machines.process import Witness
from alignedserve.lab.simulator.predicting import Knowledge, knowledge_of
from alignedserve.lab.simulator.run import ModelledRouterHands, Simulation
from alignedserve.lab.simulator.settings import Settings
from alignedserve.protocol.commands import Command, Learn, Predict, Retrain, Send
from alignedserve.protocol.messages import Expect, Member, Prefill
from alignedserve.router.prediction.length import FIRST_TRAINING
from alignedserve.scheduling.policy import Policy, Predictor, Room
from tests.simulator.summary import simulate, summary_of

SETTINGS = Settings(
    seed=3, topology=Topology.parse("1+1"), workload=Workload(num_requests=12, limited_share=0.0), num_past=20
)


class Said(Witness):
    def __init__(self) -> None:
        self.commands: list[Command] = []

    def commanded(self, by: Member, command: Command, frame: bytes) -> None:
        self.commands.append(command)

    def messages(self, kind: type) -> list[Any]:
        return [
            command.message
            for command in self.commands
            if isinstance(command, Send) and isinstance(command.message, kind)
        ]

    def of_kind(self, kind: type) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]


def ran(settings: Settings, knowledge: Knowledge | None = None) -> tuple[Said, Simulation]:
    simulation, said = Simulation(settings, knowledge=knowledge), Said()
    simulation.world.witnesses.append(said)
    assert summary_of(simulation).problems == ()
    return said, simulation


def by(predictor: Predictor, **policy: Any) -> Settings:
    return replace(SETTINGS, policy=Policy(predictor=predictor, **policy))


def test_past_prompts_predict_and_every_request_is_told_of() -> None:
    said, _ = ran(by(Predictor.HASH))
    asked = {message.request for message in said.of_kind(Predict)}
    assert len(asked) == 12
    assert {message.request for message in said.messages(Expect)} == asked
    assert len(said.of_kind(Learn)) == 12


def test_the_oracle_knows() -> None:
    said, simulation = ran(by(Predictor.ORACLE))
    told = {message.request.id: message.request.estimate for message in said.messages(Prefill)}
    lengths = {name: len(client.story.output) for name, client in simulation.clients.kept.items()}
    assert told == {name: Estimate(length, length) for name, length in lengths.items()}
    assert not said.of_kind(Predict)


@pytest.mark.parametrize("predictor", [Predictor.OFF, Predictor.CONSTANT])
def test_nobody_is_asked_where_nothing_is_learnt(predictor: Predictor) -> None:
    said, _ = ran(by(predictor))
    assert not said.of_kind(Predict)
    assert not said.of_kind(Learn)


@pytest.mark.parametrize("room", [Room.WHOLE, Room.GROWING])
def test_a_run_repeats_byte_for_byte(room: Room) -> None:
    settings = by(Predictor.HASH, room=room)
    assert simulate(settings).digest == simulate(settings).digest


def test_the_next_router_knows_what_the_router_before_has_kept() -> None:
    """The next router has what the earlier router knew when it last trained; what it learnt later is lost."""
    known = knowledge_of(Predictor.HASH, 5, seed=1)
    settings = replace(by(Predictor.HASH), workload=Workload(FIRST_TRAINING + 3, 40.0, limited_share=0.0))
    said, simulation = ran(settings, known)
    assert len(said.of_kind(Retrain)) == 1
    assert len(simulation._kept_lengths) == 5 + FIRST_TRAINING
    killed = replace(settings, faults=(Kill(at=60.0, member="router", back_after_s=0.5, seen=True),))
    _, again = ran(killed, known)
    router = again.world.alive("router")
    assert router is not None
    assert isinstance(router.hands, ModelledRouterHands)
    assert len(router.hands.predictor._learnt) == 5 + FIRST_TRAINING
