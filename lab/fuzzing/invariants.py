"""Check the invariants of a simulated run while it runs.

After every event, for the core that handled it. Cores share no state, so the others cannot have changed:

- blocks: each block of a worker is free, or taken once; if two requests may share a block, each slot is taken once;
  prefetched KV of a prefill worker takes no more than its share of blocks;
- places: a decode worker has no attempt in two places;
- pages: each page of the pool is free, leased to one holder, or part of entries; an entry has pages exactly as
  long as it waits or is out;
- leases: the pool has leased to a prefill worker the pages that the worker takes for its lease. Two cores take part,
  so this is checked after the events of both.

At every command, and when work begins and ends:

- tokens: a client gets the next tokens of its request, no others, no token twice and none after the end;
- ends once: a request is finished or refused once;
- blocks: nothing is written to blocks of a full page that several requests may read;
- refusals: a request that is refused was never placed and never is; a best-effort request is refused only where
  something can be full;
- leases: a worker copies only to pages that the pool has leased to it;
- transfers: the blocks that are sent stay unchanged, and no other work writes to the blocks that receive, until both
  sides have ended (simulator/machines/transfers.py and the modelled engine check this).

After every event too, for the whole deployment:

- waste: no attempt starts without cause, and nothing is kept without an owner (waste.py);
- progress: while requests are open, a step, a copy or a delivery happens every STALLED_S, once faults are over and
  the last frame is lost;
- patience: every request has ended by `Scenario.ends_by`.

Only at the end, when nothing moves any more: no memory is held, and leases agree (`Simulation.run`); custom policies
have raised nothing and returned no nonsense. The modelled
engine raises an exception for wrong KV; like any other exception of a core it is a failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from alignedserve.core import Chunk, Decode, FoldKv, FormOrder, ServiceClass
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.forms.buffers import Buffers
from alignedserve.jobs import messages
from alignedserve.kvpool.memory.compression import lease_to_compress
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.fuzzing.scenario import Scenario
from alignedserve.lab.fuzzing.waste import WasteWatch
from alignedserve.lab.fuzzing.worker_views import blocks_of, kept_blocks, slots_of
from alignedserve.lab.loads.records.records import RequestOutcome
from alignedserve.lab.simulator.machines.faults import Forge
from alignedserve.lab.simulator.machines.process import Process, Witness
from alignedserve.lab.simulator.run import Simulation
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, Deliver, ReceiveKv, Reject, RunStep, Send, SendKv
from alignedserve.protocol.form_orders import CompressPage, CopySlots
from alignedserve.protocol.messages import Member, Message, Prefill, Refused
from alignedserve.router.placing.admission import Queues
from alignedserve.store.job import JobStatus

if TYPE_CHECKING:
    from alignedserve.lab.simulator.job_runner import JobRunnerSimulation  # with asyncio, and this is a core

FEW_OPEN = 1000  # open requests: no run has more
STALLED_S = 30.0  # longer than any recovery: at most three requests to parts in a row, each after 5 s


class Rule(Enum):
    """What must hold; docs/how/testing.md shows the comments."""

    BLOCKS = "blocks"  # each block of a worker is free or taken once (events of the worker)
    PLACES = "places"  # a decode worker has an attempt once (events of the worker)
    PAGES = "pages"  # a page is free, idle, leased to one, or entries'; entries have pages while they wait
    LEASES = "leases"  # a worker uses only what the pool has leased to it
    TOKENS = "tokens"  # a client gets the request's next tokens: no gap, no repeat (every delivery)
    ENDS_ONCE = "ends once"  # nothing follows a request's end
    WASTE = "waste"  # no attempt starts without cause; nothing is kept without an owner, or, without faults, for long
    SPEECH = "speech"  # no member says what its role may not
    JOBS = "jobs"  # a line runs once at a time, none of a job that is over or cancelled; each has its own result
    REFUSALS = "refusals"  # what is refused was never placed and never is; BE only where something can be full
    PROGRESS = "progress"  # while requests are open, something moves every 30 s, once all is calm
    PATIENCE = "patience"  # every request has ended 60 s, and the time of all in a row, after the last fault
    NO_CRASH = "no crash"  # no core raises; a step or copy finds the KV that its plan says
    CLEAN_END = "clean end"  # 30 s after the last request nothing is held, and pool and workers agree on leases


class Failure(Exception):
    """A rule that is broken."""

    def __init__(self, rule: Rule, what: str, at: float) -> None:
        super().__init__(rule, what, at)
        self.rule, self.what, self.at = rule, what, at

    def __str__(self) -> str:
        return f"{self.rule.value}: {self.what} (at {self.at:.4f} s)"


class InvariantWatch(Witness):
    """Watch one simulation of a scenario, and raise Failure when an invariant does not hold."""

    def __init__(self, scenario: Scenario, simulation: Simulation) -> None:
        self._simulation, self._world = simulation, simulation.world
        self._calm_at, self._ends_by = scenario.calm_at, scenario.ends_by
        self._all_blocks, self._block_size = list(range(scenario.limits.num_blocks)), scenario.limits.block_size
        self._num_delivered: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._placed: set[str] = set()
        self._refused: set[str] = set()
        self._has_bounds = scenario.queues != Queues() or scenario.most_open < FEW_OPEN
        self._moved_at = 0.0
        self._has_forged = any(isinstance(fault, Forge) for fault in scenario.faults)  # members are to drop those
        self._waste = WasteWatch(scenario, self._world, simulation.clients.kept, partial(self._break, Rule.WASTE))
        self.num_events = 0

    def commanded(self, by: Member, command: Command, frame: bytes) -> None:
        match command:
            case Send():
                self._waste.commanded(by, command)
                self._check_refusal(command.message)
                return
            case Deliver(request, tokens, finish):
                self._check_delivery(request, tokens)
                if finish is not None:
                    self._check_end(request)
            case Reject(request):
                self._check_end(request)
                self._refused.add(request)
            case RunStep() | CopyOut() | CopyIn() | FormOrder():
                pass
            case SendKv():
                self._waste.sends(by, command)
            case ReceiveKv():
                pass
            case _:
                return
        self._moved_at = self._now

    def handled(self, process: Process) -> None:
        self.num_events += 1
        match process.core:
            case PoolCore() as pool:
                self._check_pool(pool)
                for worker in (process for process in self._world.processes if isinstance(process.core, DecodeCore)):
                    self._check_lease(worker)
            case DecodeCore() as core:
                self._check_blocks(process, core)
                self._check_lease(process)
        if process.num_refused and not self._has_forged:
            self._break(Rule.SPEECH, f"{process.member.name} drops what a member of its sender's role may not say")
        self._waste.look()
        self._check_time()

    def works(self, process: Process, command: Command) -> None:
        kept = kept_blocks(process.core) if isinstance(process.core, DecodeCore) else ()
        if kept and (wrong := sorted(_written(command, self._block_size).intersection(kept))):
            self._break(Rule.BLOCKS, f"{process.member.name} writes to blocks {wrong} of full pages")
        if isinstance(command, CopyOut):
            self._check_leased(process, command.pool, command.pages, "copies to")
        if isinstance(command, CompressPage):
            self._check_leased(process, command.pool, (command.into,), "compresses to", lease_to_compress)

    # --- A single core

    def _check_blocks(self, process: Process, core: DecodeCore) -> None:
        if (blocks := sorted(blocks_of(core))) != self._all_blocks:
            self._break(Rule.BLOCKS, f"of {process.member.name} {_difference(blocks, self._all_blocks)}")
        buffers = core.elsewhere
        if isinstance(buffers, Buffers) and buffers.num_blocks > buffers.most_blocks:
            self._break(Rule.BLOCKS, f"{process.member.name} has {buffers.num_blocks} blocks of prefetched KV")
        if len(held := core.here.attempts()) != len(set(held)):
            self._break(Rule.PLACES, f"{process.member.name} has twice {_difference(sorted(held), sorted(set(held)))}")
        if (shared := slots_of(core.memory)) is not None:
            size = core.memory.limits.block_size
            wrong = [block for block in shared.left if shared.num_left(block) + shared.num_right(block) > size]
            if wrong:
                self._break(Rule.BLOCKS, f"two requests share slots of {process.member.name}, in blocks {wrong}")

    def _check_pool(self, core: PoolCore) -> None:
        if (pages := sorted(core.pages.numbers)) != (wanted := sorted(core.pages.all_numbers)):
            self._break(Rule.PAGES, _difference(pages, wanted))
        if core.pages.entries != core.kept:
            odd = sorted(core.pages.entries ^ core.kept)
            self._break(Rule.PAGES, f"entries {odd} have either pages or a place in the pool, but not both")

    # --- A worker and the pool

    def _check_lease(self, worker: Process) -> None:
        assert isinstance(worker.core, DecodeCore)
        if (pool := worker.core.pool_link.member) is not None:
            self._check_leased(worker, pool.holder, worker.core.leased_pages, "believes to have")

    def _check_leased(
        self, worker: Process, pool: str, pages: tuple[int, ...], verb: str, lease: Callable[[str], str] = str
    ) -> None:
        """Check the pages against the pool's leases, but skip an earlier incarnation of the pool: its arena is gone."""
        alive = self._world.alive(pool.rpartition(".")[0]) if pages else None
        if alive is None or alive.member.holder != pool:
            return
        assert isinstance(alive.core, PoolCore)
        if foreign := sorted(set(pages) - alive.core.pages.leased_to(lease(worker.member.holder))):
            self._break(Rule.LEASES, f"{worker.member.holder} {verb} pages {foreign}, which are not leased to it")

    # --- Requests

    def _check_delivery(self, request: str, tokens: tuple[int, ...]) -> None:
        at = self._num_delivered[request]
        output = self._simulation.clients.kept[request].story.output
        if request in self._ended:
            self._break(Rule.ENDS_ONCE, f"{request} gets tokens after its end")
        if tokens != output[at : at + len(tokens)]:
            self._break(Rule.TOKENS, f"{request} gets {_listed(tokens)} at {at}, its own are {_listed(output[at:])}")
        self._num_delivered[request] += len(tokens)

    def _check_end(self, request: str) -> None:
        if request in self._ended:
            self._break(Rule.ENDS_ONCE, f"{request} ends a second time")
        self._ended.add(request)

    def _check_refusal(self, message: Message) -> None:
        match message:
            case Prefill(request):
                self._placed.add(request.id)
                if request.id in self._refused:
                    self._break(Rule.REFUSALS, f"{request.id} was refused, and runs")
            case Refused(request, attempt):
                if attempt or request in self._placed:
                    self._break(Rule.REFUSALS, f"{request} was admitted, and is refused")
                client = self._simulation.clients.kept[request]
                if client.request.service is ServiceClass.BE and not self._has_bounds:
                    self._break(Rule.REFUSALS, f"{request} is refused, but nothing is full")

    def _check_time(self) -> None:
        if self._now > self._ends_by and (late := self._open()):
            self._break(Rule.PATIENCE, f"{_listed(late)} did not end")
        is_stalled = self._now > max(self._moved_at, self._calm_at) + STALLED_S
        if is_stalled and self._now > self._frame_lost_at + STALLED_S and (waiting := self._open()):
            self._break(Rule.PROGRESS, f"nothing has moved since {self._moved_at:.4f} s, with {_listed(waiting)} open")

    @property
    def _frame_lost_at(self) -> float:
        """Return when a frame was last lost: a link that seldom speaks loses its frames long after the fault began."""
        return max(self._world.trouble.lost_at.values(), default=0.0)

    def _open(self) -> list[str]:
        return [name for name, client in self._simulation.clients.kept.items() if client.outcome is RequestOutcome.OPEN]

    @property
    def _now(self) -> float:
        return self._world.agenda.now

    def _break(self, rule: Rule, what: str) -> None:
        raise Failure(rule, what, self._now)


def _written(command: Command, block_size: int) -> set[int]:
    """Return the blocks that a worker writes."""
    match command:
        case RunStep(plan):
            return {block for part in plan.parts for block in _written_by(part, block_size)}
        case CopyIn(blocks=blocks, start=start):
            return set(blocks[start // block_size :])
        case ReceiveKv(blocks=blocks):
            return set(blocks)
        case FoldKv(folds):
            return {into for into, *_ in folds}
        case CopySlots(moves=moves):
            return {target // block_size for _, target in moves}
    return set()


def _written_by(part: Chunk | Decode, block_size: int) -> Sequence[int]:
    start = part.start - part.kv.dropped
    end = start + (len(part.tokens) if isinstance(part, Chunk) else 1)
    return part.kv.blocks[start // block_size : -(-end // block_size)]


def _difference(numbers: Sequence[Any], wanted: Sequence[Any]) -> str:
    have, want = Counter(numbers), Counter(wanted)
    lost, twice = sorted(want - have), sorted(have - want)
    return ", ".join([*([f"{lost} are lost"] if lost else []), *([f"{twice} are there twice"] if twice else [])])


def _listed(values: Iterable[object]) -> str:
    shown = [str(value) for value in values]
    return ", ".join([*shown[:5], *(["..."] if len(shown) > 5 else [])])


_Line = tuple[str, int]


class JobRules:
    """Checks the lives of the job runner, at every event that its core gets and at every command.

    - a line runs once at a time, and not again after its answer, nor when the store has its result;
    - no line of a job runs that has ended, or after the runner has read that the job is cancelled;
    - when a job ends, none of its lines runs, and then no request is left.

    At the end (simulator/job_runner.py): every job has ended, every line has one result, which is its own answer
    unless the job was cancelled or its window was over, and the runner holds nothing.
    """

    def __init__(self, breaks: Callable[[str], None]) -> None:
        """`breaks` is called with what is wrong."""
        self._breaks = breaks
        self.begins_life()

    def begins_life(self) -> None:
        self._running: set[_Line] = set()
        self._answered: set[_Line] = set()
        self._cancelled: set[str] = set()

    def told(self, event: messages.JobEvent, states: JobRunnerSimulation) -> None:
        match event:
            case messages.OpenJobsRead(jobs):
                self._cancelled |= {job.id for job in jobs if job.status is JobStatus.CANCELLING}
            case messages.LineEnded(job, line, outcome):
                self._running.discard((job, line))
                if outcome is messages.LineOutcome.DONE:
                    self._answered.add((job, line))
            case messages.LeaseLost():
                self._answered.clear()  # their results were not written, and are no longer wanted
            case messages.JobSaved(job) if not job.is_open and (left := states.open_lines(job.id)):
                self._breaks(f"{job.id} has ended, and {left} run on")

    def ordered(self, command: messages.JobCommand, states: JobRunnerSimulation) -> None:
        match command:
            case messages.RunLine(job, line):
                if why := self._why_not(job.id, line, states):
                    self._breaks(f"line {line} of {job.id} runs, but {why}")
                self._running.add((job.id, line))
            case messages.AssembleJob(job) if left := [line for other, line in self._running if other == job.id]:
                self._breaks(f"{job.id} ends, and its lines {sorted(left)} run on")
            case messages.DropLines(job):
                self._running = {(other, line) for other, line in self._running if other != job}

    def _why_not(self, job: str, line: int, states: JobRunnerSimulation) -> str:
        reasons = {
            "it is running": (job, line) in self._running,
            "it has its answer": (job, line) in self._answered,
            "it has a result": states.has_result(job, line),
            "the job has ended": not states.is_open(job),
            "the job is cancelled": job in self._cancelled,
        }
        return next((why for why, holds in reasons.items() if holds), "")
