"""Runs a trial: `run_once(trial, on_progress) -> RunRecord`; or with pictures of it, as a gateway makes them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from time import perf_counter

from alignedserve.core import ServiceClass, Slo
from alignedserve.dashboard.page import recorded_page
from alignedserve.dashboard.picture import DeploymentView, Picture
from alignedserve.errors import SimulateError
from alignedserve.lab.fuzzing.recording import RunWriter, open_run
from alignedserve.lab.loads.figures.request_figures import gaps_s, times_of
from alignedserve.lab.loads.figures.tables import write
from alignedserve.lab.loads.records.records import RequestOutcome, RequestRecord, RunRecord
from alignedserve.lab.loads.workload import Mixture
from alignedserve.lab.reports.trial import OnProgress, SimulationTrial, TrialRun
from alignedserve.lab.simulator.clients import Client
from alignedserve.lab.simulator.machines.clock import Priority
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import gateways_of
from alignedserve.lab.trials.building import settings_of
from alignedserve.metrics.recent import EndedRequest, RefusedRequest, RequestLog
from alignedserve.owner.core import OwnerCore
from alignedserve.protocol.commands import Reject
from alignedserve.protocol.messages import Figures


def run_once(trial: SimulationTrial, on_progress: OnProgress) -> RunRecord:
    return finished(Simulation(settings_of(trial)), on_progress)


def figures_of(trial: SimulationTrial) -> TrialRun:
    return TrialRun.from_record(trial, run_once(trial, lambda _ended, _all_requests: None))


def run_filmed(trial: SimulationTrial, on_progress: OnProgress, page: Path, given: Mixture | None = None) -> RunRecord:
    """Run the trial and write the page that shows it, with a slider of its time."""
    simulation = Simulation(settings_of(trial, given))
    film = Film(simulation, trial.title)
    record = finished(simulation, on_progress)
    write(page, recorded_page(film.pictures))
    return record


def run_saved(trial: SimulationTrial, on_progress: OnProgress, path: Path) -> RunRecord:
    """Run the trial and write every command of every core to a file."""
    simulation = Simulation(settings_of(trial))
    world = simulation.world
    with open_run(path, "w") as file:
        recorder = RunWriter(file, trial, world.agenda)
        world.witnesses.append(recorder)
        world.is_noted = True
        record = finished(simulation, on_progress)
        recorder.write_end(f"{len(record.requests)} requests, {len(record.problems)} problems", world.digest)
    return record


def finished(simulation: Simulation, on_progress: OnProgress) -> RunRecord:
    """Run the simulation to its end."""
    simulation.clients.on_progress = on_progress
    began_at = perf_counter()
    simulation.run()
    record = simulation.record(perf_counter() - began_at)
    if not record.requests:
        raise SimulateError("--workload: no request comes in it")
    return record


MOST_PICTURES = 600  # of a run: then every second one is dropped, and they are taken half as often
TICK_S = 1.0
_TIER = "default"


class Film:
    """Takes a picture of the simulation each virtual second, and less often where the run is long."""

    def __init__(self, simulation: Simulation, title: str) -> None:
        self._simulation, self._title = simulation, title
        self._agenda, self._clients = simulation.world.agenda, simulation.clients
        self._view, self._log = DeploymentView(), RequestLog()
        self._ended_tokens: Counter[ServiceClass] = Counter()  # of requests that are over
        self._promise: Slo | None = None  # of the first chat
        self._num_ticks, self._every = 0, 1  # ticks from one picture to the next
        self.pictures: list[bytes] = []  # as JSON
        simulation.on_figures = self._hear
        simulation.on_reject = self._refused
        self._clients.on_over = self._over
        self._plan()

    def _plan(self) -> None:
        self._agenda.at(self._agenda.now + TICK_S, Priority.CLIENT, self._tick)

    def _tick(self) -> None:
        """Count tokens each second, as a gateway does: they belong to the slot of time in which they came."""
        self._count_tokens()
        self._log.tick(self._agenda.now)
        self._num_ticks += 1
        if self._num_ticks % self._every == 0:
            self._take()
        self._plan()

    def _take(self) -> None:
        self.pictures.append(self._picture().to_json())
        if len(self.pictures) == MOST_PICTURES:
            del self.pictures[::2]
            self._every *= 2

    def _picture(self) -> Picture:
        now, owner = self._agenda.now, self._owner()
        if owner is not None:
            self._view.look(owner.members, now)
        state = "ready" if owner is not None and owner.ready else "not ready"
        return self._view.picture(now, state, (self._title,), self._log.recent(now), promise=self._promise)

    def _owner(self) -> OwnerCore | None:
        """Return the core of the first gateway that is alive."""
        for name in gateways_of(self._simulation.settings):
            process = self._simulation.world.alive(name)
            if process is not None and isinstance(process.core, OwnerCore):
                return process.core
        return None

    def _count_tokens(self) -> None:
        tokens = Counter(self._ended_tokens)
        for client in self._clients.kept.values():
            if client.outcome is RequestOutcome.OPEN:
                tokens[client.request.service] += len(client.got)
        for service, count in self._log.tokens.items():
            count.num = tokens[service]

    # --- What the simulation tells

    def _hear(self, figures: Figures) -> None:
        self._view.hear(figures, self._agenda.now)

    def _refused(self, command: Reject) -> None:
        client = self._clients.kept.get(command.request)
        if client is not None and client.outcome is RequestOutcome.OPEN:
            named = command.request, client.request.service, _TIER, self._agenda.now
            self._log.refuse(RefusedRequest(*named, command.reason.value, command.why))

    def _over(self, client: Client) -> None:
        self._ended_tokens[client.request.service] += len(client.got)
        if client.outcome is RequestOutcome.FINISHED:
            record = client.record()
            for gap_s in gaps_s(record):
                self._log.tokens[record.service].add_gap(gap_s)
            self._log.end(_ended(record))
            if record.service is ServiceClass.RT:
                self._promise = self._promise or record.slo


def _ended(record: RequestRecord) -> EndedRequest:
    kept = record.slo.outcomes(record.service, times := times_of(record))
    missed = next((deadline.value for deadline, is_kept in kept.items() if not is_kept), "")
    lengths = record.num_prompt, len(record.token_at)
    named = record.id, record.service, _TIER, record.ended_at, missed
    return EndedRequest(*named, times, *lengths, ttft_s=record.slo.ttft_s, tbt_s=record.slo.tbt_s)
