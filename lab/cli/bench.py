"""`alignedserve bench`: puts a load on servers in turns, and says what their clients got.

a workload ──▶ probe ──▶ warm-up ──▶ the load, on each server ──▶ a table, and files
                 └── which of our fields does the server take?
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from random import Random, SystemRandom
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import httpx

from alignedserve.cli.remote.batch import ENDED, BatchApi, Unreachable
from alignedserve.cli.remote.options import BatchOptions
from alignedserve.core import ServiceClass
from alignedserve.errors import AlignedServeError, BatchError, WorkloadError, file_errors
from alignedserve.http_client import RemoteServer, api_at, complaint
from alignedserve.interrupt import INTERRUPTED
from alignedserve.lab.bench import report
from alignedserve.lab.bench.answer import AskFailure
from alignedserve.lab.bench.connections import Address
from alignedserve.lab.bench.core import FIELDS, Dialect, LoadProgress, LoadTest
from alignedserve.lab.bench.disclosures import disclosures
from alignedserve.lab.bench.job import Look, endpoint_of, file_of, lines_of, of_class, records_of, together
from alignedserve.lab.bench.page import page
from alignedserve.lab.bench.player import Player
from alignedserve.lab.bench.report import ErrorCount, MeasuredRun, joined
from alignedserve.lab.bench.wording import AnyWording, IdWording, StreamWordings, WordWording
from alignedserve.lab.cli.flags import BenchOptions
from alignedserve.lab.loads.records.distribution import ratio
from alignedserve.lab.loads.records.records import RunRecord
from alignedserve.lab.loads.workload import Arrival, Load, Mixture
from alignedserve.lab.loads.workload.spec import read_workload
from alignedserve.lab.loads.workload.stream import Stream
from alignedserve.progress import ProgressBar
from alignedserve.shell.event_loop import end_tasks, run_loop

_ENDS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.5  # between two looks at the job
_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3600, 60
_ASKING_S = 30.0  # for the list of models
_WRONG_FIELD = (400, 422)
_BUSY = (429, 503)  # a server that refuses so may take the next request


def run(options: BenchOptions) -> int:
    workload = _workload(options.workload)
    if options.batch and not of_class(workload, ServiceClass.BE).streams:
        raise AlignedServeError("--batch: no stream of this workload is best-effort (service=be)")
    servers = [_find(url, options) for url in options.urls]
    bench = _BenchRun(options, workload, servers)
    run_loop(bench.measure())
    runs = bench.runs()
    if runs:
        _tell(runs, options)
    return INTERRUPTED if bench.is_interrupted else 0


def _workload(text: str) -> Mixture:
    try:
        workload = read_workload(text)
    except WorkloadError as error:
        raise AlignedServeError(f"--workload: {str(error).removeprefix('workload: ')}") from None
    if any(stream.clients.caller for stream in workload.streams):
        raise AlignedServeError("--workload: caller is for alignedserve simulate: bench has one key, that of --api-key")
    return workload


def show(options: BenchOptions) -> int:
    """Show runs that were measured before."""
    _tell([run for path in options.runs for run in report.read(path)], options)
    return 0


def _tell(runs: Sequence[MeasuredRun], options: BenchOptions) -> None:
    print(report.text(runs), end="")
    _write(options.json, lambda: report.document(runs))
    _write(options.csv, lambda: report.requests_csv(runs))
    _write(options.page, lambda: page(runs))


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is None:
        return
    with file_errors(AlignedServeError, path):
        path.write_text(text(), encoding="utf-8")


# --- The servers


@dataclass
class _BenchedServer:
    url: str  # of the API
    address: Address
    model: str
    context: int | None  # most tokens of a request, where the server tells it
    dialect: Dialect
    records: list[RunRecord] = field(default_factory=list)
    failures: dict[str, list[AskFailure]] = field(default_factory=dict)
    num_cached: int = 0


def _find(url: str, options: BenchOptions) -> _BenchedServer:
    """Ask a server for its models."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AlignedServeError(f"{url!r:.100} is no address of a server, such as http://127.0.0.1:8000")
    base = api_at(url)
    card = _card(base, options)
    context = card.get("max_model_len")
    model = options.model or str(card["id"])
    address = Address.parse(base, options.api_key, options.ca)
    return _BenchedServer(base, address, model, context if isinstance(context, int) else None, Dialect(model))


def _card(base: str, options: BenchOptions) -> Mapping[str, Any]:
    """Return what the server says of the model that is asked for; of the first model if none is."""
    with RemoteServer(base, options.api_key, silence_s=_ASKING_S, ca=options.ca) as server:
        answer = server.ask("GET", "/models")
    if answer.status_code in (401, 403):
        raise AlignedServeError(f"{base} refuses with {answer.status_code}: {complaint(answer)}")
    cards = _cards(answer)
    found = next((card for card in cards if options.model in (None, card.get("id"))), None)
    if found is None and options.model is None:
        raise AlignedServeError(f"{base}/models lists no model ({answer.status_code}): name one with --model")
    return found or {}


def _cards(answer: httpx.Response) -> list[Mapping[str, Any]]:
    try:
        return [card for card in answer.json()["data"] if isinstance(card["id"], str)]
    except (ValueError, LookupError, TypeError):
        return []


# --- What is asked of them


class _BenchRun:
    def __init__(self, options: BenchOptions, workload: Mixture, servers: Sequence[_BenchedServer]) -> None:
        self._options, self._servers = options, servers
        contexts = [server.context for server in servers if server.context is not None]
        self._workload = workload.within(min(contexts)) if contexts else workload  # the same for all servers
        told = options.disclose
        self._disclosed = None if told is None else disclosures(self._workload, options.chat, told)
        self._player: Player | None = None
        self._interrupted = asyncio.Event()

    @property
    def is_interrupted(self) -> bool:
        return self._interrupted.is_set()

    async def measure(self) -> None:
        for ending in _ENDS:
            asyncio.get_running_loop().add_signal_handler(ending, self._interrupt)
        for server in self._servers:
            await self._prepare(server)
        for number in range(self._options.rounds):
            for server in self._servers[::-1] if number % 2 else self._servers:
                if not self.is_interrupted:
                    await self._play(server, self._options.seed + number)

    def runs(self) -> list[MeasuredRun]:
        return [self._run(server) for server in self._servers if any(record.requests for record in server.records)]

    def _interrupt(self) -> None:
        """End with what is measured. The next Ctrl-C ends at once."""
        for ending in _ENDS:
            asyncio.get_running_loop().remove_signal_handler(ending)
        self._interrupted.set()
        if self._player is not None:
            self._player.stop()

    async def _prepare(self, server: _BenchedServer) -> None:
        """Find out which fields the server takes, by a request of each stream alone; then warm it up."""
        while not self.is_interrupted:
            test = await self._before(server, 1)
            failure = next((failure for found in test.failures.values() for failure in found), None)
            if failure is None or failure.status in _BUSY:
                break
            if failure.status not in _WRONG_FIELD or server.dialect.refused >= FIELDS.keys():
                raise AlignedServeError(_refusal(server, failure))
            server.dialect = server.dialect.without(failure.text)
        if self._options.warm_up and not self.is_interrupted:
            await self._before(server, self._options.warm_up)

    async def _before(self, server: _BenchedServer, number: int) -> LoadTest:
        """Send the first `number` requests of each stream at once, and count none."""
        first = Mixture(tuple(stream.at_once(number) for stream in self._workload.streams))
        with ProgressBar(f"{server.url} before", sys.stderr) as bar:
            return await self._played(server, first, -1 - self._options.seed - number, bar)

    async def _play(self, server: _BenchedServer, seed: int) -> None:
        with ProgressBar(server.url, sys.stderr) as bar:
            bar.note(f"{server.url}: {_extent(self._workload)}")
            if self._options.batch:
                test, record = await self._beside_job(server, seed, bar)
            else:
                test = await self._played(server, self._workload, seed, bar)
                record = test.record()
        server.records.append(record)
        server.num_cached += test.num_cached
        for kind, failures in test.failures.items():
            server.failures.setdefault(kind, []).extend(failures)

    async def _beside_job(self, server: _BenchedServer, seed: int, bar: ProgressBar) -> tuple[LoadTest, RunRecord]:
        """Play the chats beside one job of all best-effort requests; without chats, until the job has ended."""
        chats, lines = of_class(self._workload, ServiceClass.RT), lines_of(self._workload, seed)
        job = await self._submit(server, lines)

        def show(look: Look) -> None:
            if not chats.streams:
                bar.tell(f"{look.completed + look.failed:,} of {len(lines):,} lines ended, {look.tokens:,} tokens")

        follows = asyncio.create_task(job.follow(show))
        test = await self._played(server, chats, seed, bar)
        if not chats.streams:
            await self._until_interrupted(follows)
        await end_tasks(follows)
        await job.look()
        await job.cancel()
        ended = records_of(lines, job.id, job.looks)
        note = f"batch job {job.id}: {len(lines) - len(ended):,} of its {len(lines):,} lines had not ended: left out"
        return test, together(test.record(), ended, [note] if len(ended) < len(lines) else [])

    async def _submit(self, server: _BenchedServer, lines: Sequence[Arrival]) -> ServedJob:
        wording, window_s = self._wording(), min(arrival.request.slo.jct_s for arrival in lines)
        text, endpoint = file_of(lines, wording, server.dialect), endpoint_of(lines, wording)
        there = BatchOptions(server.url, self._options.api_key, self._options.ca)
        return await ServedJob.submit(there, text, endpoint, window_s)

    async def _until_interrupted(self, follows: asyncio.Task[None]) -> None:
        interrupted = asyncio.create_task(self._interrupted.wait())
        await asyncio.wait((follows, interrupted), return_when=asyncio.FIRST_COMPLETED)
        interrupted.cancel()

    async def _played(self, server: _BenchedServer, workload: Mixture, seed: int, bar: ProgressBar) -> LoadTest:
        test = LoadTest(Load(workload, ["bench"], seed), self._wording(), server.dialect)
        rate = _TokenRate()
        player = Player(
            test,
            server.address,
            self._options.timeout,
            lambda progress, tokens, now: bar.tell(", ".join(_parts(progress, rate.seen(tokens, now)))),
        )
        self._player = player
        await player.play()
        return test

    def _wording(self) -> AnyWording:
        """Return a wording of its own for each load: no server has seen its prompts."""
        draw = Random(SystemRandom().getrandbits(64))
        return StreamWordings(self._workload, WordWording(draw) if self._options.chat else IdWording(draw))

    def _run(self, server: _BenchedServer) -> MeasuredRun:
        record = joined(server.records)
        errors = tuple(ErrorCount(kind, len(found), found[0].text) for kind, found in server.failures.items())
        num_prompt = sum(request.num_prompt for request in record.requests if request.token_at)
        options = self._options
        cached = ratio(server.num_cached, num_prompt)
        run = MeasuredRun(server.url, server.model, options.workload, options.seed, record, errors, cached)
        return run if self._disclosed is None else replace(run, disclosed=self._disclosed)


def _extent(workload: Mixture) -> str:
    """Return for how long requests of the load arrive, or how many there are where only their number is known."""
    ends_s = [_ends_s(stream) for stream in workload.streams]
    if None in ends_s:
        return f"{sum(stream.num_requests or 0 for stream in workload.streams):,} requests"
    return f"requests come for about {max(filter(None, ends_s), default=0.0):,.0f} s"


def _ends_s(stream: Stream) -> float | None:
    if stream.span.first_s is not None:
        return stream.span.first_s
    rate = stream.arrivals.mean_rate
    return stream.num_requests / rate if stream.num_requests and rate else None


def _refusal(server: _BenchedServer, failure: AskFailure) -> str:
    if failure.status is None:
        return f"{server.url}: {failure.kind}: {failure.text}"
    return f"{server.url} refuses with {failure.status}: {failure.text}"


# --- The batch job of a load test


@dataclass
class ServedJob:
    """A job on a server. Times are seconds since it was submitted.

    One HTTP client asks for all of it: to make a client keeps the interpreter for tens of milliseconds, in which no
    token of a chat would be read.
    """

    server: BatchApi
    id: str
    submitted_at: float
    looks: list[Look]

    @classmethod
    async def submit(cls, options: BatchOptions, file: str, endpoint: str, window_s: float) -> ServedJob:
        server = BatchApi(options)
        id = await asyncio.to_thread(_submit, server, file, endpoint, _window(window_s))
        return cls(server, id, perf_counter(), [])

    async def follow(self, on_look: Callable[[Look], None]) -> None:
        """Look at the job until it has ended."""
        while await self.look(on_look) not in ENDED:
            await asyncio.sleep(_LOOK_S)

    async def look(self, on_look: Callable[[Look], None] = lambda _: None) -> str:
        """Look at the job once, and return its status; a server that does not answer is asked again next time."""
        try:
            batch, _ = await asyncio.to_thread(self.server.look, self.id)
        except Unreachable:
            return ""
        counts, usage = batch.get("request_counts") or {}, batch.get("usage") or {}
        at = perf_counter() - self.submitted_at
        self.looks.append(Look(at, counts.get("completed", 0), counts.get("failed", 0), usage.get("output_tokens", 0)))
        on_look(self.looks[-1])
        return str(batch.get("status"))

    async def cancel(self) -> None:
        """Cancel the job, unless it has ended, and ask no more."""
        with suppress(BatchError):
            await asyncio.to_thread(self.server.post, f"/batches/{self.id}/cancel", {})
        self.server.close()


def _submit(server: BatchApi, text: str, endpoint: str, window: str) -> str:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "lines.jsonl"
        file.write_text(text, encoding="utf-8")
        asked = {"input_file_id": server.upload(file)["id"], "endpoint": endpoint, "completion_window": window}
        return str(server.post("/batches", asked)["id"])


def _window(seconds: float) -> str:
    """Return a completion window as the API takes it; OpenAI's own server knows a day only."""
    if seconds >= _DAY_S:
        return "24h" if seconds == _DAY_S else f"{min(7, int(seconds / _DAY_S))}d"
    return f"{int(seconds / _HOUR_S)}h" if seconds % _HOUR_S == 0 else f"{max(10, int(seconds / _MINUTE_S))}m"


# --- What is shown meanwhile


class _TokenRate:
    """Tokens in a second, lately."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = [(0.0, 0)]

    def seen(self, tokens: int, now: float) -> float:
        self._seen = [*self._seen[-19:], (now, tokens)]  # of the last five seconds
        since, before = self._seen[0]
        return ratio(tokens - before, now - since)


def _parts(progress: LoadProgress, tokens_per_s: float) -> Iterator[str]:
    of = "" if progress.expected is None else f" of {progress.expected:,}"
    yield f"{progress.ended:,}{of} ended"
    yield f"{progress.open:,} open"
    yield f"{tokens_per_s:,.0f} tokens/s"
    if isfinite(progress.ttft_s):
        yield f"TTFT {1e3 * progress.ttft_s:.0f} ms"
    if isfinite(progress.attained):
        yield f"{100 * progress.attained:.1f} % as promised"
    if progress.failed:
        yield f"{progress.failed:,} failed"
