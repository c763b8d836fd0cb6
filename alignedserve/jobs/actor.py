"""The job runner as a process: the core on an event loop, the owner of its requests in a thread beside.

    store ─▶ Found ─▶ core ─▶ orders ─▶ files, requests, the store ─▶ facts ─▶ core

Where the store cannot be reached all waits and is tried again, with one line in the log; what has come of lines stays
here until it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import replace
from typing import Any
from uuid import uuid4

from alignedserve.config.config import Config
from alignedserve.errors import AlignedServeError, BytesGone, Conflict, Fenced, StoreError, StoreFull
from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.openai.errors import ApiError, api_error, internal
from alignedserve.jobs.answering import Answering, Asked
from alignedserve.jobs.assembling import assemble
from alignedserve.jobs.exchange import (
    Assemble,
    Check,
    Checked,
    Drop,
    Fact,
    Found,
    Index,
    Indexed,
    Keep,
    Kept,
    LeaseLost,
    LeaseTaken,
    LineEnded,
    LineRuns,
    Order,
    Outcome,
    Run,
    Save,
    Saved,
    Tell,
    Undone,
)
from alignedserve.jobs.lines import (
    MOST_LINES,
    Answer,
    Line,
    Raw,
    Rules,
    Verdict,
    answered,
    check,
    line_of,
    lost,
    raw_lines,
)
from alignedserve.jobs.places import Places
from alignedserve.jobs.state import RETRIES, RunnerCore
from alignedserve.owner.client import GivenUp, Overloaded
from alignedserve.owner.shell import Halt, Owner
from alignedserve.protocol.commands import SetTimer
from alignedserve.protocol.events import TimerFired
from alignedserve.shell.part import OnStart, Part
from alignedserve.store.job import Job, LineResult, Problem
from alignedserve.store.opening import Keeping, holder_of, open_keeping
from alignedserve.store.store import Holder
from alignedserve.text.sketches import sketcher
from alignedserve.text.text_model import TextModel

log = logging.getLogger("alignedserve.jobs")

LOOK_S = 0.5  # between two looks at the store
AGAIN_S = 1.0  # before what the store refused is tried again
LEASE_S, RENEW_S = 10.0, 2.0
SWEEP_S = 60.0  # between two looks for files that have expired
_MIB = 1 << 20


class Runner:
    """Can be stopped: open lines are dropped, what came of others is written."""

    def __init__(self, answering: Answering, config: Config, holder: Holder, now: Callable[[], float]) -> None:
        self._answering, self._config, self._holder, self._now = answering, config.jobs, holder, now
        self._most_bytes = config.server.body_limit_mb * _MIB
        self._core = RunnerCore(self._config.most_open, RETRIES)
        self._keeping: Keeping | None = None
        self._fence: int | None = None
        self._is_troubled = False  # the log has it
        self._places: dict[str, Places] = {}  # of each job's lines in its file
        self._lines: dict[str, set[asyncio.Task[None]]] = defaultdict(set)  # job -> its open lines
        self._tasks: set[asyncio.Task[None]] = set()  # all others
        self._results: dict[str, list[LineResult]] = defaultdict(list)  # that are to be written
        self._has_results, self._writing = asyncio.Event(), asyncio.Lock()
        self._halt = Halt()

    def stop(self) -> None:
        self._halt.say()

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        running = asyncio.create_task(self._run())
        stopping = asyncio.create_task(self._halt.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running  # what broke it is raised here
        await self._end()

    async def _run(self) -> None:
        await self._until_done(self._open)
        loops = (self._keep_lease, self._look, self._write, self._sweep)
        await asyncio.gather(*(self._again_and_again(one) for one in loops))

    async def _end(self) -> None:
        await self._drop_all()
        if self._keeping is None:
            return
        with contextlib.suppress(StoreError):
            await self._flush()
            await self._keeping.store.release(self._holder)
        await self._keeping.close()

    # --- Facts and orders

    def _deliver(self, fact: Fact) -> None:
        for order in self._core.handle(fact, self._now()):
            self._perform(order)

    def _perform(self, order: Order) -> None:
        match order:
            case SetTimer(name, at):
                asyncio.get_running_loop().call_later(at - self._now(), self._deliver, TimerFired(name))
            case Run(job):
                self._begin(self._line(order), self._lines[job.id])
            case Keep(job, result):
                self._results[job].append(result)
                self._has_results.set()
            case Drop(job):
                self._drop(job)
            case Tell(forecasts):
                self._begin(self._guarded(None, self._store.set_forecasts(forecasts)), self._tasks)
            case Check(job):
                self._begin(self._guarded(job, self._check(job)), self._tasks)
            case Index(job):
                self._begin(self._guarded(job, self._index(job)), self._tasks)
            case Save(job):
                self._begin(self._guarded(job, self._save(job)), self._tasks)
            case Assemble(job):
                self._begin(self._guarded(job, self._assemble(order)), self._tasks)

    def _begin(self, work: Coroutine[Any, Any, None], group: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)

    async def _guarded(self, job: Job | None, work: Awaitable[None]) -> None:
        """Whatever the store says against it: an order that came to nothing is made anew."""
        try:
            await work
        except Fenced as error:
            self._lease_lost(error)
        except Conflict:
            self._undone(job)
        except StoreError as error:
            self._trouble(error)
            self._undone(job)
        except Exception:
            log.exception("%s broke", job.id if job is not None else "a forecast")
            self._undone(job)

    def _undone(self, job: Job | None) -> None:
        if job is not None:
            self._deliver(Undone(job.id))

    @property
    def _store(self) -> Any:
        assert self._keeping is not None
        return self._keeping.store

    # --- Jobs

    def _rules(self, job: Job) -> Rules:
        return Rules(job.endpoint, self._answering.models, MOST_LINES, self._most_bytes)

    async def _check(self, job: Job) -> None:
        assert self._keeping is not None
        if await self._store.file(job.owner, job.input_file_id) is None:
            gone = Problem("file_not_found", f"there is no file {job.input_file_id} any more", param="input_file_id")
            return self._deliver(Checked(job.id, 0, None, (gone,)))
        try:
            verdict = await asyncio.to_thread(self._read_check, job)
        except BytesGone as error:
            gone = Problem("file_not_found", str(error), param="input_file_id")
            return self._deliver(Checked(job.id, 0, None, (gone,)))
        self._deliver(Checked(job.id, verdict.total, verdict.model, verdict.problems))
        return None

    def _read_check(self, job: Job) -> Verdict:
        assert self._keeping is not None
        with self._keeping.blobs.open(job.input_file_id) as file:
            return check(file, self._rules(job))

    async def _index(self, job: Job) -> None:
        done = await self._store.done(job.id)
        places = self._places[job.id] = await asyncio.to_thread(self._read_places, job, done)
        self._deliver(Indexed(job.id, places.lines))

    def _read_places(self, job: Job, but: Collection[int]) -> Places:
        assert self._keeping is not None
        with self._keeping.blobs.open(job.input_file_id) as file:
            return Places.of(raw for raw in raw_lines(file, self._most_bytes) if raw.number not in but)

    async def _save(self, job: Job) -> None:
        self._deliver(Saved(await self._store.save_job(self._dated(job), self._fence)))

    def _dated(self, job: Job) -> Job:
        """Where it has ended, until when it is kept: as long as its files at least."""
        if job.is_open:
            return job
        lives_s = max(self._config.keep_s, job.output_lives_s or 0)
        return replace(job, kept_until=int(self._now()) + lives_s)

    async def _assemble(self, order: Assemble) -> None:
        assert self._keeping is not None
        await self._flush()  # what was done before it was stopped
        now, keep_s = self._now(), self._config.keep_s
        ended = await assemble(self._keeping, order.job, order.status, self._most_bytes, now, keep_s)
        try:
            saved = await self._store.save_job(self._dated(ended.job), self._fence, ended.files)
        except (Conflict, Fenced, StoreFull):  # after another error it may have been saved: the sweep can tell, later
            await ended.discard(self._keeping)
            raise
        self._places.pop(order.job.id, None)
        self._lines.pop(order.job.id, None)
        self._deliver(Saved(saved))

    # --- Lines

    async def _line(self, order: Run) -> None:
        job, number = order.job, order.line
        try:
            line = await asyncio.to_thread(self._read_line, job, number)
        except BytesGone as error:  # they do not come back, and others' lines are not to wait for that
            return self._deliver(LineEnded(job.id, number, Outcome.DONE, lost(number, str(error))))
        except StoreError as error:
            self._trouble(error)
            return self._deliver(LineEnded(job.id, number, Outcome.REFUSED, retry_after_s=AGAIN_S))
        request_id = f"req-{uuid4().hex}"
        caller = Caller(job.owner, salt=job.salt)
        asked = Asked(request_id, job.endpoint, line.body, order.jct_s, order.estimate, caller)
        outcome, retry_after_s = Outcome.DONE, 0.0
        try:
            body = await self._answering.answer(asked, lambda: self._deliver(LineRuns(job.id, number)))
            answer = Answer(200, request_id, body)
        except Exception as error:
            refusal = isinstance(error, Overloaded) and not isinstance(error, GivenUp)
            if refusal:
                retry_after_s = error.retry_after_s  # type: ignore[attr-defined]
                return self._deliver(LineEnded(job.id, number, Outcome.REFUSED, retry_after_s=retry_after_s))
            outcome, told = _told(error)
            answer = Answer(told.status, request_id, told.body)
        self._deliver(LineEnded(job.id, number, outcome, answered(number, line.custom_id, answer)))
        return None

    def _read_line(self, job: Job, number: int) -> Line:
        assert self._keeping is not None
        offset, size = self._places[job.id].of_line(number)
        with self._keeping.blobs.open(job.input_file_id) as file:
            file.seek(offset)
            try:
                return line_of(Raw(number, offset, file.read(size)))
            except (ValueError, LookupError, TypeError):
                raise BytesGone(f"line {number} of {job.input_file_id} is not what was checked any more") from None

    def _drop(self, job: str) -> None:
        for task in self._lines.pop(job, ()):
            task.cancel()

    async def _drop_all(self) -> None:
        tasks = [*self._tasks, *(task for lines in self._lines.values() for task in lines)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lines.clear()

    # --- What goes on all the time

    async def _again_and_again(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._until_done(work)

    async def _until_done(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await work()
            except Fenced as error:
                self._lease_lost(error)
            except StoreError as error:
                self._trouble(error)
                await asyncio.sleep(AGAIN_S)

    def _trouble(self, error: StoreError) -> None:
        if not self._is_troubled:
            log.error("batch jobs wait: %s", error)
        self._is_troubled = True

    async def _open(self) -> None:
        self._keeping = await open_keeping(self._config, self._holder)
        about = await self._store.about()
        log.debug("jobs are kept in %s %s: %s", about.kind, about.version, "; ".join(about.guarantees))
        for warning in about.warnings:
            log.warning("%s", warning)

    async def _keep_lease(self) -> None:
        """It is lost for us before it can be another's: renewed well before it ends, or given up."""
        try:
            number = await asyncio.wait_for(self._store.lease(self._holder, LEASE_S), LEASE_S - 2 * RENEW_S)
        except (StoreError, asyncio.TimeoutError) as error:
            if self._fence is not None:
                self._lease_lost(error)
            raise StoreError(f"the lease cannot be renewed: {error}") from error
        if number is None:
            if self._fence is not None:
                self._lease_lost("it was not renewed in time")
        elif number != self._fence:
            self._fence = number
            log.debug("this job runner is the active one (lease %d)", number)
            self._deliver(LeaseTaken())
        self._is_troubled = False
        await asyncio.sleep(RENEW_S)

    def _lease_lost(self, why: object) -> None:
        if self._fence is None:
            return
        log.warning("this job runner is not the active one any more: %s", why)
        self._fence = None
        self._results.clear()
        self._places.clear()
        self._deliver(LeaseLost())

    async def _look(self) -> None:
        if self._fence is not None:
            self._deliver(Found(tuple(await self._store.open_jobs())))
        await asyncio.sleep(LOOK_S)

    async def _write(self) -> None:
        await self._has_results.wait()
        await self._flush()

    async def _flush(self) -> None:
        """All results that are here, those of a job together; they stay here until they are written."""
        async with self._writing:
            self._has_results.clear()
            for job in list(self._results):
                results = list(self._results.get(job, ()))
                if not results or self._fence is None:
                    continue
                await self._add(job, results)
                del self._results[job][: len(results)]
                self._deliver(Kept(job, tuple(one.line for one in results)))
                if not self._results[job]:
                    del self._results[job]

    async def _add(self, job: str, results: list[LineResult]) -> None:
        try:
            await self._store.add_results(job, results, self._fence)
        except StoreError:
            self._has_results.set()
            raise

    async def _sweep(self) -> None:
        """Files that have expired go, but for those that are still read; batches that are kept no longer; and bytes
        that never became a file, or are none any more."""
        assert self._keeping is not None
        if self._fence is None:
            return await asyncio.sleep(LOOK_S)
        read = {job.input_file_id for job in await self._store.open_jobs()}
        for file in await self._store.expired_files(self._now()):
            if file.id not in read:
                await self._keeping.remove(file)
        await self._store.forget_jobs(self._now())
        await self._keeping.sweep()
        return await asyncio.sleep(SWEEP_S)


def _told(error: Exception) -> tuple[Outcome, ApiError]:
    """Whether another try may fare better, and what the error file has of it if there is none."""
    if isinstance(error, AlignedServeError):
        return Outcome.FAILED if isinstance(error, GivenUp) else Outcome.DONE, api_error(error)
    log.error("a line broke", exc_info=error)
    return Outcome.FAILED, internal()


def run(part: Part, on_start: OnStart) -> None:
    config = part.config
    _, capacity = part.capacity()
    text = TextModel.load(part.folder)
    owner = Owner(part, sketcher(config.policy.predictor, text))
    models = (config.served_model_name or config.model,)
    answering = Answering(owner, text, models, capacity.max_model_len)
    holder = holder_of(part.spec.deployment, part.spec.name, part.incarnation)
    runner = Runner(answering, config, holder, owner.now)
    on_start(runner)
    with owner.running():
        runner.run()
