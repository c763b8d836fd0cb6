"""Give the results of a simulated run to Python code: figures, tables, files, and the story of each request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from alignedserve.config.sources import hint
from alignedserve.core import WORKERS, Role
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.errors import SimulateError
from alignedserve.explain.sentences import lines
from alignedserve.explain.story import PartAnswer, Story, tell
from alignedserve.explain.trace_file import trace_of
from alignedserve.lab.loads.figures import tables
from alignedserve.lab.loads.records import record_file
from alignedserve.lab.loads.records.records import RequestOutcome, RequestRecord, RunRecord
from alignedserve.lab.loads.workload import Mixture
from alignedserve.lab.reports import plots, report
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.timeline import timeline
from alignedserve.lab.reports.trial import SimulationTrial, TrialRun
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import gateways_of
from alignedserve.lab.trials.building import settings_of
from alignedserve.lab.trials.running import run_filmed
from alignedserve.protocol.commands import Send
from alignedserve.protocol.events import Received
from alignedserve.protocol.messages import AskDecisions, Decisions
from alignedserve.router.state import RouterCore

_HEARD_S = 1.0  # after a request's end: by then every part has noted the end
_TOKEN_TITLES = ("request", "service", "index", "at_s", "gap_s")
_LIBRARIES = ("pandas", "polars")

Frame: TypeAlias = Any  # pandas.DataFrame, polars.DataFrame, or dict[str, list]


def frame_of(titles: Sequence[str], rows: Iterable[Iterable[Any]]) -> Frame:
    """Return a dataframe of pandas or polars where one of them is installed, else columns."""
    table = [*map(tuple, rows)]
    columns = {title: [row[place] for row in table] for place, title in enumerate(titles)}
    for library in _LIBRARIES:
        with suppress(ImportError):
            return import_module(library).DataFrame(columns)
    return columns


@dataclass(frozen=True, repr=False)
class SimulatedRun:
    """A run that has ended. Printed, it is the table of `alignedserve simulate`; times are seconds since it began."""

    trial: SimulationTrial
    _given: Mixture | None
    record: RunRecord  # all that happened: the figures and the tables follow from it
    _simulation: Simulation

    def __repr__(self) -> str:
        return report.summary(self._run)

    @property
    def summary(self) -> RunFigures:
        """Return the figures that the command's table and JSON have."""
        return self._run.figures

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what the simulation found wrong with itself: a run with any proves nothing."""
        return self.record.problems

    @property
    def notes(self) -> tuple[str, ...]:
        return self.record.notes

    @cached_property
    def _run(self) -> TrialRun:
        return TrialRun.from_record(self.trial, self.record)

    # --- Tables

    @cached_property
    def requests(self) -> Frame:
        """Return a row for each request, with the columns of --csv."""
        rows = (tables.request_row(request, self.record.began_at) for request in self.record.requests)
        return frame_of(tables.REQUEST_TITLES, rows)

    @cached_property
    def steps(self) -> Frame:
        """Return a row for each step of each worker, with the columns of --csv."""
        rows = (report.step_row(step, self.record.began_at) for step in self.record.steps)
        return frame_of(report.STEP_TITLES, rows)

    @cached_property
    def tokens(self) -> Frame:
        """Return a row for each token: when it reached its client, and how long after the token before it."""
        began_at = self.record.began_at
        rows = (
            (request.id, request.service.value, index, at - began_at, at - before)
            for request in self.record.requests
            for index, (before, at) in enumerate(pairwise((request.arrival_at, *request.token_at)))
        )
        return frame_of(_TOKEN_TITLES, rows)

    # --- One request

    def explain(self, request: str) -> RequestStory:
        """Tell what happened to a request, as `alignedserve explain` does.

        Parts remember their last decisions. Where parts have forgotten the request, the run is repeated up to the
        request's end.
        """
        record = self._record_of(request)
        story = story_of(self._simulation, request)
        if not story.moments or story.forgotten_before:
            again = Simulation(settings_of(self.trial, self._given))
            is_open = record.outcome is RequestOutcome.OPEN
            again.run_until((self.record.ended_at if is_open else record.ended_at) + _HEARD_S)
            story = story_of(again, request)
        return RequestStory(story)

    def _record_of(self, name: str) -> RequestRecord:
        named = {request.id: request for request in self.record.requests}
        if name not in named:
            raise SimulateError(f"the run has no request {name!r:.60}{hint(str(name), named)}")
        return named[name]

    # --- Files, as the command writes them

    def page(self, path: str | Path) -> None:
        """Write the live page of the run, with a slider of its time; the run is repeated for its pictures."""
        run_filmed(self.trial, lambda _ended, _all: None, Path(path), self._given)

    def json(self, path: str | Path) -> None:
        """Write all figures."""
        tables.write(Path(path), report.document([self._run]))

    def timeline(self, path: str | Path) -> None:
        """Write a trace for ui.perfetto.dev."""
        tables.write(Path(path), timeline(self.record))

    def plot(self, path: str | Path) -> None:
        """Draw a .png or .svg; this needs matplotlib."""
        plots.check(Path(path))
        plots.plot_run(self.record, self.trial.title, Path(path))

    def save(self, path: str | Path) -> None:
        """Write all that happened, as --record does: `record_file.load` reads it."""
        record_file.save(self.record, Path(path))


@dataclass(frozen=True, repr=False)
class RequestStory:
    """The story of a request. It prints as `alignedserve explain` prints it."""

    story: Story  # its stages, decisions and steps

    def __repr__(self) -> str:
        return "\n".join(lines(self.story))

    def perfetto(self, path: str | Path) -> None:
        """Write the story as a trace for ui.perfetto.dev."""
        tables.write(Path(path), trace_of(self.story))


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
