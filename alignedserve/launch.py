"""Starts a deployment and keeps it alive until it is told to stop.

What to start and what to do when a part ends is the same for both launchers: `plan` says which parts
there are, a `Keeper` keeps them. `serve` runs them as processes of this machine; with `launcher: ray` it
hands them to Ray (ray_launch.py).
"""

from __future__ import annotations

import http.client
import itertools
import math
import os
import queue
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from alignedserve.capacity import capacity
from alignedserve.config import Config, Launcher, dump
from alignedserve.control import Asked, Door, door_of
from alignedserve.core import OWNERS, Role
from alignedserve.errors import AlignedServeError
from alignedserve.exposure import checked, warnings
from alignedserve.gateway.listener import bind
from alignedserve.kvpool.shared_files import check_space, remove_stale
from alignedserve.links import tell
from alignedserve.memory import check_machine, shared_memory, use_of
from alignedserve.messages import ROUTER, Died, Retire, rank_suffix
from alignedserve.model_config import read_config
from alignedserve.model_source import resolve
from alignedserve.parts import USER_ERROR, PartSpec
from alignedserve.scaling import change, check
from alignedserve.store.opening import is_on, settled

LOOPBACK = "127.0.0.1"
PREFIX = "alignedserve-"  # of all our files in shared memory
READY_S = 120.0  # a deployment that cannot take a request by then has failed
READY_LOOK_S = 0.1  # between two looks at whether it can
GRACE_S = 5.0  # between asking a process to stop and killing it
QUICK_DEATH_S = 5.0  # a part that ends so soon after its start ...
MOST_QUICK_DEATHS = 3  # ... so often in a row is not started again


def serve(config: Config) -> int:
    """Serve until stopped; the exit code."""
    config = checked(config)
    # Two ports are known from outside. They are bound here as long as we live, and listened at by the parts:
    # so nobody else is given them, not even while a part that ended is being started again.
    with bind(config.server.host, config.server.port) as web:
        config = replace(config, server=replace(config.server, port=web.getsockname()[1]))
        for warning in warnings(config.server):
            print(f"alignedserve: warning: {warning}", file=sys.stderr, flush=True)
        if config.ray.address is not None:
            from alignedserve.cluster_launch import serve_on_cluster

            return serve_on_cluster(config)
        return _serve_here(config)


def _serve_here(config: Config) -> int:
    # A model named by a hub id is looked up here once, so that all parts have the same folder of it.
    named = config.served_model_name or config.model
    config = replace(config, model=str(resolve(config.model)), served_model_name=named, jobs=settled(config.jobs))
    with ExitStack() as bound:
        router = bound.enter_context(bind(LOOPBACK, 0))
        specs = plan(config, f"tcp://{LOOPBACK}:{router.getsockname()[1]}")
        meetings = {spec.worker: bound.enter_context(bind(LOOPBACK, 0)) for spec in specs if spec.rank}
        specs = [_meeting_at(spec, meetings.get(spec.worker)) for spec in specs]
        try:
            if config.launcher is Launcher.RAY:
                from alignedserve.ray_launch import serve_on_ray

                return serve_on_ray(config, specs)
            return _Local(config, specs).run()
        finally:
            remove_stale(Path(config.kvpool.directory), PREFIX)


def plan(config: Config, router: str) -> list[PartSpec]:
    """The parts of a deployment on one machine, after all checks that need no process."""
    folder = resolve(config.model)
    model = read_config(folder)
    room = capacity(config, model)
    directory = Path(config.kvpool.directory)
    topology, ranks = config.topology, config.engine.tensor_parallel_size
    remove_stale(directory, PREFIX)
    if not topology.colocated:
        check_space(directory, shared_memory(config, model, room), use_of(config))
    check_machine(config, model, room, folder)
    deployment, tree = f"{PREFIX}{os.getpid()}", dump(config)
    gpus = itertools.count()

    def gpu(role: Role) -> int:
        return next(gpus) if role in (Role.PREFILL, Role.DECODE) else 0

    return [
        PartSpec(
            *(role, f"{name}{rank_suffix(rank)}", "local", deployment, LOOPBACK, router, tree),
            rank=rank,
            device=gpu(role),
            door=str(door_of(config.server.port)),
        )
        for role, name in parts_of(config)
        for rank in range(ranks if role in (Role.PREFILL, Role.DECODE) else 1)
    ]


def _meeting_at(spec: PartSpec, listener: socket.socket | None) -> PartSpec:
    """Where the ranks of a worker meet is bound here too, and the same in all its lives."""
    return replace(spec, ranks_at=f"{LOOPBACK}:{listener.getsockname()[1]}") if listener is not None else spec


def parts_of(config: Config) -> list[tuple[Role, str]]:
    """With their names."""
    topology = config.topology
    names = [(Role.ROUTER, ROUTER)]
    names += [] if topology.colocated else [(Role.POOL, "pool-0")]
    names += [(Role.PREFILL, f"prefill-{number}") for number in range(topology.prefill_workers)]
    names += [(Role.DECODE, f"decode-{number}") for number in range(topology.decode_workers)]
    names += [(Role.GATEWAY, f"gateway-{number}") for number in range(config.server.gateways)]
    return names + ([(Role.JOBS, "jobs-0")] if is_on(config.jobs) else [])


def url_of(config: Config) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)
    scheme = "http" if config.server.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.server.port}"


def announce_when_ready(config: Config, give_up: Callable[[], None]) -> None:
    """Print the address and a line to try as soon as the deployment takes requests; from a thread."""

    def wait() -> None:
        deadline = time.monotonic() + READY_S
        while not is_ready(config):  # asked again and again, as a client would: no part can tell for all others
            if time.monotonic() > deadline:
                print(f"alignedserve: not ready within {READY_S:.0f} s", file=sys.stderr, flush=True)
                return give_up()
            time.sleep(READY_LOOK_S)
        print(_greeting(config), flush=True)
        return None

    threading.Thread(target=wait, name="ready", daemon=True).start()


def is_ready(config: Config) -> bool:
    address = urlsplit(url_of(config))
    assert address.hostname is not None
    if address.scheme == "https":
        whoever = ssl._create_unverified_context()  # our own port, bound above: its name need not be in the certificate
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            address.hostname, address.port, timeout=2, context=whoever
        )
    else:
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=2)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _greeting(config: Config) -> str:
    model = config.served_model_name or config.model
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Count from 3 to 12."}}]}}'
    has_keys = config.server.api_key or config.server.keys_file
    key = ' -H "Authorization: Bearer $ALIGNEDSERVE_SERVER_API_KEY"' if has_keys else ""
    return (
        f"serving {model} on {url_of(config)}\n"
        f"try: curl -N {url_of(config)}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    )


@dataclass(frozen=True)
class _Ended:
    part: str
    incarnation: int
    how: object  # for the log
    failure: str  # what keeps the part from running at all; empty where another start may help


@dataclass(frozen=True)
class _Overdue:
    """A part was to have ended by itself by now."""

    part: str
    incarnation: int


@dataclass(frozen=True)
class _Due:
    """What the keeper is to do, in its own thread, as long as this life of a part goes on."""

    part: str
    incarnation: int
    act: Callable[[], None]


@dataclass
class _Life:
    """Of a part, from one start to its end."""

    spec: PartSpec
    quick_deaths: int  # of the lives before it, in a row
    began_at: float = math.inf


class Keeper(ABC):
    """Starts every part, starts again whichever ends, and stops them all; a launcher says how each is done."""

    def __init__(self, config: Config, specs: Sequence[PartSpec]) -> None:
        self._config, self._specs = config, list(specs)
        self._lives: dict[str, _Life] = {}
        self._alive: set[str] = set()
        self._retiring: dict[str, Asked | None] = {}  # parts that are to end, and who hears of that
        self._added: set[str] = set()  # parts that were not planned: where they cannot be, all else goes on
        self._happened: queue.SimpleQueue[_Ended | _Overdue | _Due | Asked | None] = queue.SimpleQueue()  # None: stop
        self._code = 0  # of our exit, where we are told to stop
        self._asked_to_stop: Asked | None = None

    @abstractmethod
    def start(self, spec: PartSpec) -> None:
        """Start the part; say `began` when its process is there, and `ended` once, when it is over."""

    @abstractmethod
    def ask_to_stop(self, part: str) -> None: ...

    @abstractmethod
    def end(self, part: str) -> None:
        """Now, whatever it is doing; nothing where it has ended already."""

    def forget(self, part: str) -> None:  # noqa: B027  (most have nothing to forget)
        """It has ended for good."""

    def another(self, like: PartSpec, name: str) -> PartSpec:
        return replace(like, name=name)

    def make_place(self, part: str) -> Sequence[str]:
        """For a worker that is to be started beside those that were planned; which pools are to be started with it."""
        return ()

    def goes_with(self, part: str) -> Sequence[str]:
        """Parts that are of no use without this worker, which goes."""
        return ()

    def began(self, part: str) -> None:
        self._lives[part].began_at = time.monotonic()

    def ended(self, spec: PartSpec, how: object, failure: str = "") -> None:
        """From any thread."""
        self._happened.put(_Ended(spec.name, spec.incarnation or 0, how, failure))

    def hear_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._happened.put(None))

    def run(self) -> int:
        """Until a signal says stop, or nothing can be served; the exit code."""
        self.hear_signals()
        try:
            for spec in self._specs:
                if not spec.rank:
                    self._start(spec.worker, quick_deaths=0)
            announce_when_ready(self._config, self._give_up)
            door = Door(self._config.server.port, self._happened.put)
            try:
                return self._watch()
            finally:
                door.close()
        finally:
            self._stop_all()

    def _watch(self) -> int:
        while (ended := self._happened.get()) is not None:
            if isinstance(ended, Asked):
                if ended.wanted.stop:
                    ended.answer("it stops: open requests are finished, nothing new is taken")
                    self._asked_to_stop = ended  # its connection ends with us
                    return 0
                self._scale(ended)
                continue
            if not self._is_news(ended):
                continue
            if isinstance(ended, _Due):
                ended.act()
                continue
            if isinstance(ended, _Overdue):
                self.end(ended.part)
                continue
            self._alive.discard(ended.part)
            if ended.part in self._retiring:
                self._retired(ended)
                continue
            if ended.part in self._added and (ended.failure or self._is_hopeless(ended)):
                self._left_out(ended)
                continue
            if ended.failure:
                print(f"alignedserve: {ended.failure}", file=sys.stderr, flush=True)
                return USER_ERROR  # what others say of the same fault is not heard
            life = self._lives[ended.part]
            if ended.part != ROUTER:
                self._end_worker(life.spec.worker)
                tell(life.spec.router, Died(life.spec.worker, ended.incarnation), life.spec.keys)
            quick_deaths = self._quick_deaths(life)
            print(f"alignedserve: {ended.part} ended with {ended.how}", file=sys.stderr, flush=True)
            if quick_deaths >= MOST_QUICK_DEATHS:
                print(f"alignedserve: {ended.part} does not stay up; see its log above", file=sys.stderr, flush=True)
                return 1
            self._start(life.spec.worker, quick_deaths)
        return self._code

    @staticmethod
    def _quick_deaths(life: _Life) -> int:
        """In a row, of a part that has just ended."""
        return life.quick_deaths + 1 if time.monotonic() - life.began_at < QUICK_DEATH_S else 0

    def _is_hopeless(self, ended: _Ended) -> bool:
        return self._quick_deaths(self._lives[ended.part]) >= MOST_QUICK_DEATHS

    def _left_out(self, ended: _Ended) -> None:
        """It was asked for, and cannot be."""
        why = ended.failure or "it does not stay up; see its log above"
        print(f"alignedserve: {ended.part} is left out: {why}", file=sys.stderr, flush=True)
        others = self.goes_with(ended.part)
        self._forget(ended)
        for other in others:
            self._retiring[other] = None
            self.end(other)

    def _scale(self, asked: Asked) -> None:
        workers = [(spec.role, spec.name) for spec in self._specs if spec.role in (Role.PREFILL, Role.DECODE)]
        try:
            check(self._config, asked.wanted)
            wanted = change(workers, self._retiring, asked.wanted)
        except AlignedServeError as error:
            asked.answer(f"error: {error}")
            return asked.done()
        if asked.wanted.why:
            print(f"alignedserve: scales by itself: {asked.wanted.why}", file=sys.stderr, flush=True)
        for name in wanted.new:
            for part in (*self.make_place(name), name):
                self._add(part)
                asked.answer(f"{part} starts")
        for name in wanted.retiring:
            spec = self._lives[name].spec
            self._retiring[name] = asked
            if self._lives[name].began_at == math.inf:  # it waits for a place
                self.end(name)
                continue
            asked.answer(f"{name} takes nothing new, and ends when nothing is left there")
            tell(spec.router, Retire(name, spec.incarnation or 0), spec.keys)
            overdue = _Overdue(name, spec.incarnation or 0)
            timer = threading.Timer(self._config.server.drain_s, self._happened.put, [overdue])
            timer.daemon = True
            timer.start()
        return asked.done() if not wanted.retiring else None

    def _add(self, part: str) -> None:
        role = Role(part.partition("-")[0])
        like = next(spec for spec in self._specs if spec.role is role)
        self._specs.append(self.another(like, part))
        self._added.add(part)
        self._start(part, quick_deaths=0)

    def _retired(self, ended: _Ended) -> None:
        asked, others = self._retiring.pop(ended.part), self.goes_with(ended.part)
        self._forget(ended)
        for other in others:
            self._retiring[other] = asked
            self.end(other)
        if asked is not None:
            asked.answer(f"{ended.part} has ended")
            if asked not in self._retiring.values():
                asked.done()

    def _forget(self, ended: _Ended) -> None:
        """For good."""
        life = self._lives.pop(ended.part)
        self._specs = [spec for spec in self._specs if spec.name != ended.part]
        self._added.discard(ended.part)
        tell(life.spec.router, Died(ended.part, ended.incarnation), life.spec.keys)
        self.forget(ended.part)

    def later(self, spec: PartSpec, act: Callable[[], None]) -> None:
        """In our own thread, unless the part has ended by then; from any thread."""
        self._happened.put(_Due(spec.name, spec.incarnation or 0, act))

    def _is_news(self, ended: _Ended | _Overdue | _Due) -> bool:
        """A rank that was ended with its worker is not: there is another already."""
        life = self._lives.get(ended.part)
        return life is not None and life.spec.incarnation == ended.incarnation

    def _ranks(self, worker: str) -> list[PartSpec]:
        """All its parts; of what is no worker, itself."""
        return [spec for spec in self._specs if spec.worker == worker]

    def _end_worker(self, worker: str) -> None:
        """Ranks cannot go on without each other."""
        for spec in self._ranks(worker):
            if spec.name in self._alive:
                self.end(spec.name)
                self._alive.discard(spec.name)

    def _give_up(self) -> None:
        self._code = 1
        self._happened.put(None)

    def _start(self, part: str, quick_deaths: int) -> None:
        """All ranks of a worker are of one life."""
        incarnation = time.time_ns()
        for rank in self._ranks(part):
            spec = replace(rank, incarnation=incarnation)
            self._lives[spec.name] = _Life(spec, quick_deaths)
            self.start(spec)
            self._alive.add(spec.name)

    def _stop_all(self) -> None:
        """Owners of requests first: a gateway drains, and the others are needed for that. Other ranks after rank 0."""
        specs = {part: self._lives[part].spec for part in self._alive}
        owners = {part for part, spec in specs.items() if spec.role in OWNERS}
        ranks = {part for part, spec in specs.items() if spec.rank}
        self._stop(owners, self._config.server.drain_s + GRACE_S)
        self._stop(self._alive - owners - ranks, GRACE_S)
        self._stop(self._alive & ranks, GRACE_S)

    def _stop(self, parts: set[str], patience_s: float) -> None:
        """A second signal ends the patience."""
        for part in parts:
            self.ask_to_stop(part)
        deadline = time.monotonic() + patience_s
        while self._alive & parts:
            try:
                ended = self._happened.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if ended is None:
                break
            if isinstance(ended, _Ended) and self._is_news(ended):
                self._alive.discard(ended.part)
        for part in parts:
            self.end(part)


class _Local(Keeper):
    """Every part a process of ours."""

    def __init__(self, config: Config, specs: Sequence[PartSpec]) -> None:
        super().__init__(config, specs)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, spec: PartSpec) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "alignedserve.parts", spec.name],  # the name is for who looks at `ps`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher alone
        )
        self._processes[spec.name] = process
        self.began(spec.name)
        threading.Thread(target=self._wait, args=(spec, process), name=f"wait-{spec.name}", daemon=True).start()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(spec.to_json().encode() + b"\n")
            process.stdin.flush()  # and stays open: its end tells the part that we have gone

    def _wait(self, spec: PartSpec, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        assert process.stdout is not None
        self.ended(spec, code, process.stdout.read().decode() if code == USER_ERROR else "")

    def another(self, like: PartSpec, name: str) -> PartSpec:
        """On a device that no other has."""
        taken = {spec.device for spec in self._specs if spec.role in (Role.PREFILL, Role.DECODE)}
        return replace(like, name=name, device=next(number for number in itertools.count() if number not in taken))

    def ask_to_stop(self, part: str) -> None:
        self._processes[part].terminate()

    def end(self, part: str) -> None:
        self._processes[part].kill()
        self._processes[part].wait()


def no_ray() -> AlignedServeError:
    return AlignedServeError("the launcher ray needs Ray: pip install 'alignedserve[ray]'")
