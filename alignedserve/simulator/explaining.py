"""The story of a request in a simulated deployment, told as by a gateway of a live deployment."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.core import WORKERS, Role
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.explain.story import PartAnswer, Story, tell
from alignedserve.protocol.commands import Send
from alignedserve.protocol.events import Received
from alignedserve.protocol.messages import AskDecisions, Decisions
from alignedserve.router.state import RouterCore
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import gateways_of


def story_of(simulation: Simulation, request: str) -> Story:
    """Ask every part of the deployment, as it is now, what it decided about the request."""
    parts = [name for name, role in simulation.launcher.members.items() if role in (Role.ROUTER, *WORKERS)]
    answers = [answer for part in parts for answer in _answers(simulation, part, request)]
    silent = {*parts} - {answer.part for answer in answers}
    return tell(request, answers, silent, simulation.world.agenda.now)


def _answers(simulation: Simulation, part: str, request: str) -> Iterator[PartAnswer]:
    process = simulation.world.alive(part)
    if process is None:
        return
    assert isinstance(process.core, RouterCore | DecodeCore)
    question = Received(gateways_of(simulation.settings)[0], AskDecisions(1, request), 1)
    for command in process.core.handle(question, simulation.world.agenda.now):
        if isinstance(command, Send) and isinstance(command.message, Decisions):
            yield PartAnswer(part, command.message.findings)
