"""Simulated deployments explain each of their requests: from its arrival to its end, without a gap."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from alignedserve.config.topology import Topology
from alignedserve.core import ServiceClass, WorkerLimits
from alignedserve.explain.decisions import Kind
from alignedserve.explain.sentences import lines
from alignedserve.explain.story import Story, StoryStage
from alignedserve.explain.trace_file import trace_of
from alignedserve.lab.api.simulated_run import story_of
from alignedserve.lab.loads.workload import Workload
from alignedserve.lab.loads.workload.spec import read_workload
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import Settings
from tests.rare import rarely

TIGHT = WorkerLimits(num_blocks=40, block_size=16, page_size=64, max_step_tokens=64, max_batch=4)
CROWDED = WorkerLimits(num_blocks=40, block_size=16, page_size=64, max_step_tokens=64, max_batch=16)
CROWD = read_workload(
    "coserve,first_s=1,chat.rate=60,chat.prompt=40,chat.output=40,chat.max_tokens=60,"
    "documents.in_flight=12,documents.prompt=60-200,documents.output=60"
)


def stories(simulation: Simulation) -> list[Story]:
    return [story_of(simulation, name) for name in simulation.clients.kept]


@cache
def crowded() -> Simulation:
    """Return a run in which memory is short, so that chats take it from best-effort requests."""
    simulation = Simulation(Settings(topology=Topology.parse("colocated"), workload=CROWD, limits=CROWDED))
    simulation.run()
    return simulation


@pytest.mark.parametrize(
    ("limits", "topology"),
    [
        *((TIGHT, "colocated"), (TIGHT, "1+1"), (Settings().limits, "1+1")),
        *map(rarely, [(TIGHT, "2+2"), (Settings().limits, "2+2"), (Settings().limits, "colocated")]),
    ],
)
def test_each_request_is_explained_from_its_arrival_to_its_end(topology: str, limits: WorkerLimits) -> None:
    workload = Workload(num_requests=40, rate=100.0)
    simulation = Simulation(Settings(topology=Topology.parse(topology), workload=workload, limits=limits, num_pages=12))
    simulation.run()
    for story in stories(simulation):
        assert story.end is not None, story.request
        assert story.end.kind is Kind.ENDED, "\n".join(lines(story))
        assert story.stays[0].stage is StoryStage.ROUTING
        assert story.stays[-1].ended_at == story.end.at
        assert all(before.ended_at == after.began_at for before, after in pairwise(story.stays))
        prompt = sum(chunk.tokens for stay in story.stays for chunk in stay.noted(Kind.CHUNK))
        assert prompt > 0
        decoding = [stay for stay in story.stays if stay.stage is StoryStage.DECODE]
        tokens = max((noted.tokens for noted in decoding[-1].noted(Kind.ENDED)), default=0) if decoding else 1
        assert tokens > 0
        assert trace_of(story)


def test_a_document_that_had_to_leave_is_told_of_the_chats_that_decoded_meanwhile() -> None:
    simulation = crowded()
    told = stories(simulation)
    waits = [stay for story in told if story.service is ServiceClass.BE for stay in story.stays if stay.seconds > 0]
    beside = [noted for stay in waits if stay.stage is not StoryStage.DECODE for noted in stay.noted(Kind.BESIDE)]
    assert any(" rt" in noted.why for noted in beside)


def test_a_request_that_had_to_leave_names_the_request_that_got_its_memory() -> None:
    simulation = crowded()
    told = {story.request: story for story in stories(simulation)}
    displaced = [noted for story in told.values() for stay in story.stays for noted in stay.noted(Kind.DISPLACED)]
    named = [noted for noted in displaced if noted.other]
    assert displaced
    assert named
    for noted in named:
        assert noted.request in [moment.decision.request for moment in told[noted.other].displaced]
