"""Run the job runner as a process: its core on an event loop, and the owner of its requests in a thread of its own.

    store ─▶ OpenJobsRead ─▶ core ─▶ commands ─▶ files, requests, the store ─▶ events ─▶ core

While the store cannot be reached, everything waits and is tried again, with a single line in the log. Results of lines
stay here until they are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from uuid import uuid4

from alignedserve.architectures.vectors import read_pooled
from alignedserve.config.config import Config
from alignedserve.config.prices import Prices
from alignedserve.dashboard.sharing import RequestPictures, request_pictures
from alignedserve.errors import AlignedServeError, BytesGone, ConfigError, Conflict, Fenced, StoreError, StoreFull
from alignedserve.gateway.access.adapters import Adapters
from alignedserve.gateway.access.budgets import Budgets, budgets_of
from alignedserve.gateway.access.keys import MOST_OPEN, Caller, KeyRing, KeysFile, Limits, Scope
from alignedserve.gateway.access.ledger import JOB_RUNNER, Ledger, ledger_name
from alignedserve.gateway.embed_side import embedding_model
from alignedserve.gateway.openai.errors import api_error
from alignedserve.gateway.settings import body_limit_bytes
from alignedserve.jobs.answering import THREADS, Answering, BatchAnswers, KeyLimited, LineRequest
from alignedserve.jobs.assembling import assemble, discard
from alignedserve.jobs.lines import (
    MOST_LINES,
    BatchLine,
    LinePlaces,
    LineRules,
    RawLine,
    Verdict,
    answered_line,
    check_file,
    custom_id_of,
    failed_line,
    raw_lines,
    read_checked_line,
)
from alignedserve.jobs.messages import (
    AssembleJob,
    CheckJob,
    DropLines,
    IndexJob,
    JobChecked,
    JobCommand,
    JobCommandFailed,
    JobEvent,
    JobIndexed,
    JobSaved,
    LeaseLost,
    LeaseTaken,
    Line,
    LineEnded,
    LineOutcome,
    LineRuns,
    OpenJobsRead,
    PublishForecasts,
    ResultsStored,
    RunLine,
    SaveJob,
    StoreResult,
)
from alignedserve.jobs.metrics import JobCollector
from alignedserve.jobs.open_lines import OpenLines
from alignedserve.jobs.state import RETRIES, JobFigures, RunnerCore
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.owner.client import GivenUp, Overloaded
from alignedserve.owner.shell import Halt, Owner
from alignedserve.owner.siblings import Siblings, siblings
from alignedserve.protocol.commands import SetTimer
from alignedserve.protocol.events import TimerFired
from alignedserve.shell.bounded_threads import BoundedThreads, WorkTooLong
from alignedserve.shell.event_loop import ENDS, end_tasks, run_loop
from alignedserve.shell.part import OnStart, Part
from alignedserve.store.job import RESPONSES, Job, JobStatus, LineResult, Problem
from alignedserve.store.storage import Storage, check_shared, data_folder, holder_of, open_storage
from alignedserve.store.store import MOST_TOGETHER, Holder, Store
from alignedserve.text.text_model import TextModel
from alignedserve.tracing.traces import traces_to

log = logging.getLogger("alignedserve.jobs")

POLL_S = 0.5  # between two reads of the open jobs
RETRY_S = 1.0  # before an operation that the store refused is tried again
LEASE_S, RENEW_S = 10.0, 2.0
SWEEP_S = 60.0  # between two searches for files that have expired
_ENDS_RUNNER = "the job runner died more than once while this request alone was running: it is not tried again"
_MAY_RUN = (JobStatus.VALIDATING, JobStatus.IN_PROGRESS)
_Tasks: TypeAlias = dict["asyncio.Task[None]", None]  # in the order in which they began, which is that of their ends


class JobRunner:
    """The job runner's shell. When it is stopped, it drops open lines and writes the results that it has."""

    def __init__(
        self,
        answering: BatchAnswers,
        config: Config,
        holder: Holder,
        now: Callable[[], float],
        wall: Callable[[], float] = time.time,
        open_lines: OpenLines | None = None,
        read_keys: Callable[[], KeyRing] = lambda: KeyRing(()),
    ) -> None:
        """`now` never jumps. `wall` is the clock of files and of jobs' windows, which outlive this process. Without
        `open_lines` a line that ends the job runner is not found."""
        self._answering, self._config, self._now = answering, config.jobs, now
        self._wall, self._read_keys, self._keys = wall, read_keys, read_keys()
        self._holder = replace(holder, keys=self._keys.digest)
        self._keys_fault = ""  # why they could not be read again
        self.reload(config)
        self._core = RunnerCore(self._config.most_open, RETRIES, self._lines_of, self._weight_of)
        self._open_lines = open_lines
        self._opened: Storage | None = None  # None until it is open
        self._fence: int | None = None  # the number of the lease while this runner has it
        self._has_logged_trouble = False
        self._places: dict[str, LinePlaces] = {}  # job -> places of its lines in its file
        self._lines: dict[str, _Tasks] = defaultdict(dict)  # job -> its open lines
        self._tasks: _Tasks = {}  # all other tasks
        self._results: dict[str, list[LineResult]] = defaultdict(list)  # job -> results that must be written
        self._has_results, self._writing = asyncio.Event(), asyncio.Lock()
        self._threads = BoundedThreads(THREADS, "lines")  # read and write them
        self._readers = BoundedThreads(THREADS, "files", times=5)  # read whole files, of up to 200 MB
        self._halt = Halt()

    @property
    def held(self) -> dict[str, int]:
        """Return the counts of what the runner holds now; all are zero when no job is open."""
        results = sum(map(len, self._results.values()))
        tasks = sum(map(len, self._lines.values())) + len(self._tasks)
        return {**self._core.held, "results": results, "places": len(self._places), "tasks": tasks}

    @property
    def figures(self) -> JobFigures:
        """Return what metrics show of jobs."""
        return self._core.figures(self._wall())

    def _lines_of(self, owner: str) -> int:
        """Return how many lines of the caller behind a job's owner may be open at once: 0 where its key, or the scope
        for batches or responses, has been revoked."""
        scope = Scope.GENERATE if owner.endswith(RESPONSES) else Scope.BATCH
        limits = self._keys.limits(owner.removesuffix(RESPONSES), scope)
        if limits is None:
            return 0
        return self._config.most_open if limits.most_open is None else limits.most_open

    def _weight_of(self, caller: str) -> int:
        return Caller(caller, limits=self._keys.limits(caller) or Limits()).weight

    def reload(self, config: Config) -> None:
        self._most_bytes = body_limit_bytes(config)

    def stop(self) -> None:
        self._halt.say()

    async def serve(self) -> None:
        running = asyncio.create_task(self._run())
        stopping = asyncio.create_task(self._halt.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running  # raises the error that ended it, if there is one
        await self._end()

    async def _run(self) -> None:
        await self._retry(self._open)
        loops = (self._keep_lease, self._poll, self._write, self._sweep)
        await asyncio.gather(*map(self._repeat, loops))

    async def _end(self) -> None:
        await end_tasks(*self._tasks, *(task for lines in self._lines.values() for task in lines))
        self._lines.clear()
        if self._opened is None:
            return
        with contextlib.suppress(StoreError):
            await self._flush()
            self._note(())  # it was stopped, it did not die
            await self._store.release(self._holder)
        await self._storage.close()

    # --- Events and commands

    def _deliver(self, event: JobEvent) -> None:
        commands = self._core.handle(event, self._now(), self._wall())
        self._note(self._core.open_lines)
        for command in commands:
            self._perform(command)

    def _note(self, open: Collection[Line]) -> None:
        """Note which lines are open, before they run, while this runner is the active one."""
        if self._open_lines is not None and self._fence is not None:
            self._open_lines.write(open, self._core.blame)

    def _perform(self, command: JobCommand) -> None:
        match command:
            case SetTimer(name, at):
                asyncio.get_running_loop().call_later(at - self._now(), self._deliver, TimerFired(name))
            case RunLine(job):
                self._begin(self._run_line(command), self._lines[job.id])
            case StoreResult(job, result):
                self._results[job].append(result)
                self._has_results.set()
            case DropLines(job):
                self._drop(job)
            case PublishForecasts(forecasts):
                self._begin(self._guard(None, lambda: self._store.set_forecasts(forecasts)), self._tasks)
            case CheckJob(job):
                self._begin(self._guard(job, lambda: self._check(job)), self._tasks)
            case IndexJob(job):
                self._begin(self._guard(job, lambda: self._index(job)), self._tasks)
            case SaveJob(job):
                self._begin(self._guard(job, lambda: self._save(job)), self._tasks)
            case AssembleJob(job):
                self._begin(self._guard(job, lambda: self._assemble(command)), self._tasks)

    def _begin(self, work: Coroutine[Any, Any, None], group: _Tasks) -> None:
        task = asyncio.create_task(work)
        group[task] = None
        task.add_done_callback(lambda ended: group.pop(ended, None))

    async def _guard(self, job: Job | None, work: Callable[[], Awaitable[None]]) -> None:
        """Perform a command; if it fails, report that, and the core makes it again from the job's state."""
        try:
            await work()
        except Fenced as error:
            self._lose_lease(error)
        except Conflict:
            self._report_failure(job)
        except StoreError as error:
            self._log_trouble(error)
            self._report_failure(job)
        except WorkTooLong as error:  # its disk may hang, and come back
            log.error("%s waits: %s", job.id if job is not None else "a forecast", error)
            self._report_failure(job)
        except ENDS:
            raise
        except BaseException:
            log.exception("%s failed", job.id if job is not None else "a forecast")
            self._report_failure(job)

    def _report_failure(self, job: Job | None) -> None:
        if job is not None:
            self._deliver(JobCommandFailed(job.id))

    @property
    def _storage(self) -> Storage:
        assert self._opened is not None
        return self._opened

    @property
    def _store(self) -> Store:
        return self._storage.store

    # --- Jobs

    async def _check(self, job: Job) -> None:
        try:
            if await self._store.file(job.owner, job.input_file_id) is None:
                raise BytesGone(f"there is no file {job.input_file_id} any more")
            verdict = await self._readers.do(lambda: self._check_file(job))
        except BytesGone as error:
            verdict = 0, None, (Problem("file_not_found", str(error), param="input_file_id"),)
        self._deliver(JobChecked(job.id, *verdict))

    def _check_file(self, job: Job) -> Verdict:
        rules = LineRules(job.endpoint, self._answering.serves, MOST_LINES, self._most_bytes)
        with self._storage.blobs.open(job.input_file_id) as file:
            return check_file(file, rules)

    async def _index(self, job: Job) -> None:
        done = await self._store.done_lines(job.id)
        places = self._places[job.id] = await self._readers.do(lambda: self._read_places(job, done))
        self._deliver(JobIndexed(job.id, places.lines))

    def _read_places(self, job: Job, done: Collection[int]) -> LinePlaces:
        with self._storage.blobs.open(job.input_file_id) as file:
            return LinePlaces(line for line in raw_lines(file, self._most_bytes) if line.number not in done)

    async def _save(self, job: Job) -> None:
        if job.status is JobStatus.CANCELLING:
            log.warning("%s of %s is cancelled: %s", job.id, job.caller, job.problems[-1].message)
        self._deliver(JobSaved(await self._store.save_job(self._with_kept_until(job), self._fence)))

    def _with_kept_until(self, job: Job) -> Job:
        """Return the job; if it has ended, with the instant until which it is kept: at least as long as its files."""
        if job.is_open:
            return job
        lives_s = max(self._config.keep_s, job.output_lives_s or 0)
        return replace(job, kept_until=int(self._wall()) + lives_s)

    async def _assemble(self, command: AssembleJob) -> None:
        await self._flush()  # write the results of lines that ended before the job was stopped
        now, keep_s = self._wall(), self._config.keep_s
        ended, files = await assemble(self._storage, command.job, command.status, self._most_bytes, now, keep_s)
        try:
            saved = await self._store.save_job(self._with_kept_until(ended), self._fence, files)
        except (Conflict, Fenced, StoreFull):  # after any other error the job may be saved: the sweep finds out later
            await discard(self._storage, files)
            raise
        self._drop(command.job.id)
        self._deliver(JobSaved(saved))

    # --- Lines

    async def _run_line(self, command: RunLine) -> None:
        job, number = command.job, command.line
        try:
            self._deliver(await self._answer_line(command))
        except ENDS:
            raise
        except BaseException:
            log.exception("line %d of %s failed", number, job.id)
            name, said = await self._name_of(job, number), f"line {number}: the server fails at it: see its log"
            failed = failed_line(number, name, "internal_error", said)
            self._deliver(LineEnded(job.id, number, LineOutcome.FAILED, failed))

    async def _answer_line(self, command: RunLine) -> LineEnded:
        job, number = command.job, command.line
        ended = partial(LineEnded, job.id, number)
        if command.is_given_up:
            log.error("line %d of %s has ended the job runner again and again: it is failed", number, job.id)
            failed = failed_line(number, await self._name_of(job, number), "job_runner_died", _ENDS_RUNNER)
            return ended(LineOutcome.DONE, failed)
        try:
            custom_id, body = await self._threads.do(lambda: self._read_line(job, number))
        except BytesGone as error:  # the bytes do not come back, and lines of other jobs must not wait for them
            return ended(LineOutcome.DONE, failed_line(number, None, "file_not_found", f"line {number}: {error}"))
        except StoreError as error:
            self._log_trouble(error)
            return ended(LineOutcome.REFUSED, retry_after_s=RETRY_S)
        request_id = f"req-{uuid4().hex}"
        caller = Caller(job.caller, salt=job.salt, limits=self._keys.limits(job.caller) or Limits())
        request = LineRequest(request_id, job.endpoint, body, command.jct_s, command.estimate, caller)
        outcome, status = LineOutcome.DONE, 200
        try:
            answer = await self._answering.answer(request, lambda: self._deliver(LineRuns(job.id, number)))
        except KeyLimited as error:
            return ended(LineOutcome.LIMITED, retry_after_s=error.retry_after_s)
        except ENDS:
            raise
        except BaseException as error:
            if isinstance(error, Overloaded) and not isinstance(error, GivenUp):
                return ended(LineOutcome.REFUSED, retry_after_s=error.retry_after_s)
            if not isinstance(error, AlignedServeError):
                log.error("a line failed", exc_info=error)
            if isinstance(error, GivenUp) or not isinstance(error, AlignedServeError):
                outcome = LineOutcome.FAILED
            fault = api_error(error)
            status, answer = fault.status, fault.body
        result = await self._threads.do(lambda: answered_line(number, custom_id, request_id, status, answer))
        return ended(outcome, result)

    async def _name_of(self, job: Job, number: int) -> str | None:
        """Return the custom_id of a line at which this process fails, or ends, perhaps where it reads its JSON."""
        try:
            return custom_id_of(await self._threads.do(lambda: self._bytes_of(job, number)))
        except (StoreError, WorkTooLong, LookupError):  # LookupError: the job has ended meanwhile
            return None

    def _read_line(self, job: Job, number: int) -> BatchLine:
        raw = self._bytes_of(job, number)
        try:
            return read_checked_line(raw)
        except (ValueError, LookupError, TypeError):
            message = f"line {number} of {job.input_file_id} has changed since it was checked"
            raise BytesGone(message) from None

    def _bytes_of(self, job: Job, number: int) -> RawLine:
        offset, size = self._places[job.id].find(number)
        with self._storage.blobs.open(job.input_file_id) as file:
            file.seek(offset)
            return RawLine(number, offset, file.read(size))

    def _drop(self, job: str) -> None:
        self._places.pop(job, None)
        for task in self._lines.pop(job, ()):
            task.cancel()

    # --- Loops

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._retry(work)

    async def _retry(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work, again and again until the store allows it."""
        while True:
            try:
                return await work()
            except Fenced as error:
                self._lose_lease(error)
            except StoreError as error:
                self._log_trouble(error)
                await asyncio.sleep(RETRY_S)

    def _log_trouble(self, error: StoreError) -> None:
        if not self._has_logged_trouble:
            log.error("batch jobs wait: %s", error)
        self._has_logged_trouble = True

    async def _open(self) -> None:
        self._opened = await open_storage(self._config, self._holder)
        description = await self._store.describe()
        guarantees = "; ".join(description.guarantees)
        log.debug("jobs are kept in %s %s: %s", description.kind, description.version, guarantees)
        for warning in description.warnings:
            log.warning("%s", warning)

    async def _keep_lease(self) -> None:
        """Take or renew the lease well before it ends, or give it up before another job runner can have it."""
        if self._fence is None:
            await check_shared(self._store, self._config, self._holder, self._wall())
        try:
            number = await asyncio.wait_for(self._store.lease(self._holder, LEASE_S), LEASE_S - 2 * RENEW_S)
        except (StoreError, asyncio.TimeoutError) as error:
            self._lose_lease(error)
            raise StoreError(f"the lease cannot be renewed: {error}") from error
        if number is None:
            self._lose_lease("it was not renewed in time")
        elif number != self._fence:
            self._fence = number
            log.debug("this job runner is the active one (lease %d)", number)
            self._deliver(LeaseTaken({} if self._open_lines is None else self._open_lines.read()))
        self._has_logged_trouble = False
        await asyncio.sleep(RENEW_S)

    def _lose_lease(self, reason: object) -> None:
        if self._fence is None:
            return
        log.warning("this job runner is not the active one any more: %s", reason)
        self._fence = None
        self._results.clear()
        self._places.clear()
        for task in self._tasks:  # what was begun under this lease would answer in the next
            task.cancel()
        self._deliver(LeaseLost())

    async def _poll(self) -> None:
        """Read the open jobs and the keys. While the keys cannot be read, jobs of unknown callers wait: they are left
        out."""
        if self._fence is not None:
            jobs = await self._store.open_jobs()
            try:
                self._keys, self._keys_fault = await asyncio.to_thread(self._read_keys), ""
            except ConfigError as error:
                if str(error) != self._keys_fault:
                    log.error("the keys are as they were, and batches of others wait: %s", error)
                self._keys_fault = str(error)
                jobs = [job for job in jobs if job.status not in _MAY_RUN or self._lines_of(job.owner)]
            full = [owner for owner in {job.owner for job in jobs} if await self._is_full(owner)]
            if self._fence is not None:
                self._deliver(OpenJobsRead(tuple(jobs), frozenset(full)))
        await asyncio.sleep(POLL_S)

    async def _is_full(self, owner: str) -> bool:
        """Return whether files and results take more than the owner may have, whoever wrote them."""
        return (await self._store.usage(owner)).bytes > self._config.quota_mb * 1_000_000

    async def _write(self) -> None:
        await self._has_results.wait()
        await self._flush()

    async def _flush(self) -> None:
        """Write all results that wait, those of a job together; they stay here until they are written."""
        async with self._writing:
            self._has_results.clear()
            jobs = deque(self._results)
            while jobs:
                job = jobs.popleft()
                waiting = self._results.get(job, [])
                results = _together(waiting)
                if not results or self._fence is None:
                    continue
                try:
                    await self._store.add_results(job, results, self._fence)
                except StoreError:
                    self._has_results.set()
                    raise
                if self._results.get(job) is not waiting:
                    continue  # the lease was lost and taken again meanwhile: its results are others
                del waiting[: len(results)]
                self._deliver(ResultsStored(job, tuple(result.line for result in results)))
                if waiting:
                    jobs.append(job)
                else:
                    del self._results[job]

    async def _sweep(self) -> None:
        """Remove expired files that no open job reads, jobs that are no longer kept, and bytes without a file."""
        if self._fence is None:
            return await asyncio.sleep(POLL_S)
        used = {job.input_file_id for job in await self._store.open_jobs()}
        for file in await self._store.expired_files(self._wall()):
            if file.id not in used:
                await self._storage.remove(file)
        await self._store.forget_jobs(self._wall())
        await self._store.forget_responses(self._wall())
        await self._storage.sweep()
        return await asyncio.sleep(SWEEP_S)


def _together(waiting: Iterable[LineResult]) -> list[LineResult]:
    """Return the first results, no more than are MOST_TOGETHER characters: any may be large."""
    results, size = list[LineResult](), 0
    for result in waiting:
        if size >= MOST_TOGETHER:
            break
        results.append(result)
        size += len(result.text)
    return results


def run(part: Part, on_start: OnStart) -> None:
    config, (shapes, capacity) = part.config, part.capacity()
    text = TextModel.load(part.folder, config.reasoning_parser, config.tool_call_parser)
    text = replace(text, pooled=read_pooled(part.folder, shapes))
    owner, names = Owner(part), config.model_names
    model = names[0]
    traces = traces_to(config.server.otlp_endpoint, model)
    adapters, places = Adapters.for_part(part), asyncio.Semaphore(max(MOST_OPEN, config.jobs.most_open))
    keys_file = KeysFile(config.server.api_key, config.server.keys_file)
    named = config.server.metrics_prefix, owner.now, part.spec.name
    prices = Prices.from_config(config)
    metrics = RequestMetrics(model, *named, keys_file.ring.knows_name, prices)
    budgets = budgets_of(config.jobs)
    ledger = Ledger(part.shared_memory / ledger_name(part.spec.deployment), JOB_RUNNER, budgets)
    of_all, embed = (traces, adapters, places, ledger), embedding_model(part)
    embedding = None
    if embed is not None:
        beside, _ = embed
        of_texts = beside.max_model_len, metrics.of_model(beside.name)
        embedding = Answering(beside.client, beside.text, (beside.name,), *of_texts, *of_all)
    answering = Answering(owner, text, names, capacity.max_model_len, metrics, *of_all, embedding)
    pictures = request_pictures(part, metrics.log, owner.now)
    holder = holder_of(part.spec.deployment, part.spec.name, part.incarnation, model)
    open_lines = OpenLines(data_folder(config.jobs), holder)
    runner = JobRunner(answering, config, holder, owner.now, open_lines=open_lines, read_keys=keys_file.read)
    JobCollector(metrics.series, lambda: runner.figures)
    on_start(runner)
    for take in (keys_file.follow, runner.reload, prices.reload):
        part.live.on_change(take)
    of_embed = contextlib.nullcontext() if embed is None else embed[1].running()
    with contextlib.closing(traces), owner.running(), of_embed:
        run_loop(_serve(runner, siblings(part, lambda _: metrics.text()), pictures, budgets), part.watch)


async def _serve(runner: JobRunner, others: Siblings, pictures: RequestPictures, budgets: Budgets) -> None:
    async with others.listening(), pictures.listening(), budgets.kept():
        await runner.serve()
