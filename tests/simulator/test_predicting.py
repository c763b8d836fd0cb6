"""Predicted lengths in virtual time: prompts are placed with them, and runs repeat byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.config.topology import Topology
from alignedserve.core import Estimate
from alignedserve.lab.loads.workload import Workload
from alignedserve.lab.simulator.machines.process import Witness
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import Settings
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import Member, Prefill
from alignedserve.scheduling.lengths import LEAST_ENDED
from alignedserve.scheduling.policy import Policy, Predictor, Room
from tests.simulator.summary import simulate, summary_of

SETTINGS = Settings(
    seed=3, topology=Topology.parse("1+1"), workload=Workload(num_requests=3 * LEAST_ENDED, limited_share=0.0)
)


class Placed(Witness):
    """Notes what each prompt was placed with."""

    def __init__(self) -> None:
        self.estimates = dict[str, Estimate | None]()

    def commanded(self, by: Member, command: Command, frame: bytes) -> None:
        if isinstance(command, Send) and isinstance(command.message, Prefill):
            self.estimates[command.message.request.id] = command.message.request.estimate


def ran(settings: Settings) -> tuple[Placed, Simulation]:
    simulation, placed = Simulation(settings), Placed()
    simulation.world.witnesses.append(placed)
    assert summary_of(simulation).problems == ()
    return placed, simulation


def by(predictor: Predictor, **policy: Any) -> Settings:
    return replace(SETTINGS, policy=Policy(predictor=predictor, **policy))


def test_outputs_that_have_ended_predict_later_ones() -> None:
    placed, _ = ran(by(Predictor.HASH))
    known = [estimate is not None for estimate in placed.estimates.values()]
    assert not any(known[:LEAST_ENDED])
    assert known[-1]


def test_the_oracle_knows() -> None:
    placed, simulation = ran(by(Predictor.ORACLE))
    lengths = {name: len(client.story.output) for name, client in simulation.clients.kept.items()}
    assert placed.estimates == {name: Estimate(length, length) for name, length in lengths.items()}


@pytest.mark.parametrize("predictor", [Predictor.OFF, Predictor.CONSTANT])
def test_nothing_is_predicted_where_nothing_is_learnt(predictor: Predictor) -> None:
    placed, _ = ran(by(predictor))
    assert not any(placed.estimates.values())


@pytest.mark.parametrize("room", [Room.WHOLE, Room.GROWING])
def test_a_run_repeats_byte_for_byte(room: Room) -> None:
    settings = by(Predictor.HASH, room=room)
    assert simulate(settings).digest == simulate(settings).digest
