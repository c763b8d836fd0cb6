"""Starts a deployment and keeps it alive until it is told to stop.

What to start is the same for both launchers: `plan` says which parts there are. `serve` runs them as
processes of this machine; with `launcher: ray` it hands them to Ray (ray_launch.py).
"""

from __future__ import annotations

import http.client
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from alignedserve.capacity import capacity
from alignedserve.config import Config, Launcher, dump
from alignedserve.core import Role
from alignedserve.errors import AlignedServeError
from alignedserve.gateway.listener import bind
from alignedserve.kvpool.arena import check_space, remove_stale
from alignedserve.links import tell
from alignedserve.messages import ROUTER, Died
from alignedserve.model_config import read_config
from alignedserve.model_source import resolve
from alignedserve.parts import USER_ERROR, PartSpec

LOOPBACK = "127.0.0.1"
PREFIX = "alignedserve-"  # of all our files in shared memory
READY_S = 120.0  # a deployment that cannot take a request by then has failed
GRACE_S = 5.0  # between asking a process to stop and killing it
QUICK_DEATH_S = 5.0  # a part that ends so soon after its start ...
MOST_QUICK_DEATHS = 3  # ... so often in a row is not started again


def serve(config: Config) -> int:
    """Serve until stopped; the exit code."""
    # Two ports are known from outside. They are bound here as long as we live, and listened at by the parts:
    # so nobody else is given them, not even while a part that ended is being started again.
    with bind(config.server.host, config.server.port) as web, bind(LOOPBACK, 0) as router:
        config = replace(config, server=replace(config.server, port=web.getsockname()[1]))
        specs = plan(config, f"tcp://{LOOPBACK}:{router.getsockname()[1]}")
        if config.launcher is Launcher.RAY:
            from alignedserve.ray_launch import serve_on_ray

            return serve_on_ray(config, specs)
        return _Local(config, specs).run()


def plan(config: Config, router: str) -> list[PartSpec]:
    """The parts of a deployment on one machine, after all checks that need no process."""
    model = read_config(resolve(config.model))
    room = capacity(config, model)
    directory = Path(config.kvpool.directory)
    topology = config.topology
    remove_stale(directory, PREFIX)
    if not topology.colocated:
        check_space(directory, room.num_pages * room.page_bytes)
    names = [(Role.ROUTER, ROUTER)]
    names += [] if topology.colocated else [(Role.POOL, "pool-0")]
    names += [(Role.PREFILL, f"prefill-{number}") for number in range(topology.prefill_workers)]
    names += [(Role.DECODE, f"decode-{number}") for number in range(topology.decode_workers)]
    names += [(Role.GATEWAY, "gateway-0")]
    deployment, tree = f"{PREFIX}{os.getpid()}", dump(config)
    return [PartSpec(role, name, "local", deployment, LOOPBACK, router, tree) for role, name in names]


def url_of(config: Config) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.server.host, config.server.host)
    return f"http://{host}:{config.server.port}"


def announce_when_ready(config: Config, give_up: Callable[[], None]) -> None:
    """Print the address and a line to try as soon as the deployment takes requests; from a thread."""

    def wait() -> None:
        deadline = time.monotonic() + READY_S
        while not is_ready(config):
            if time.monotonic() > deadline:
                print(f"alignedserve: not ready within {READY_S:.0f} s", file=sys.stderr, flush=True)
                return give_up()
            time.sleep(0.1)
        print(_greeting(config), flush=True)
        return None

    threading.Thread(target=wait, name="ready", daemon=True).start()


def is_ready(config: Config) -> bool:
    host, _, port = url_of(config).removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=2)
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
    key = ' -H "Authorization: Bearer $ALIGNEDSERVE_SERVER_API_KEY"' if config.server.api_key else ""
    return (
        f"serving {model} on {url_of(config)}\n"
        f"try: curl -N {url_of(config)}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    )


@dataclass
class _Process:
    spec: PartSpec
    popen: subprocess.Popen[bytes]
    started_at: float
    quick_deaths: int


class _Local:
    """Every part a process; a part that ends is started again."""

    def __init__(self, config: Config, specs: list[PartSpec]) -> None:
        self._config, self._specs = config, specs
        self._router = specs[0].router
        self._processes: dict[str, _Process] = {}
        self._happened: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # a part that ended; None: stop
        self._code = 0  # of our exit, where we are told to stop

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._happened.put(None))
        try:
            for spec in self._specs:
                self._start(spec, quick_deaths=0)
            announce_when_ready(self._config, self._give_up)
            code = self._watch()
        finally:
            self._stop_all()
        return code

    def _watch(self) -> int:
        while (name := self._happened.get()) is not None:
            ended = self._processes[name]
            if ended.popen.returncode == USER_ERROR:
                assert ended.popen.stdout is not None
                print(f"alignedserve: {ended.popen.stdout.read().decode()}", file=sys.stderr, flush=True)
                return USER_ERROR  # what others say of the same fault is not heard
            if name != ROUTER:
                tell(self._router, Died(name, ended.spec.incarnation or 0))
            quick = time.monotonic() - ended.started_at < QUICK_DEATH_S
            quick_deaths = ended.quick_deaths + 1 if quick else 0
            print(f"alignedserve: {name} ended with {ended.popen.returncode}", file=sys.stderr, flush=True)
            if quick_deaths >= MOST_QUICK_DEATHS:
                print(f"alignedserve: {name} does not stay up; see its log above", file=sys.stderr, flush=True)
                return 1
            self._start(ended.spec, quick_deaths)
        return self._code

    def _give_up(self) -> None:
        self._code = 1
        self._happened.put(None)

    def _start(self, spec: PartSpec, quick_deaths: int) -> None:
        spec = replace(spec, incarnation=time.time_ns())
        popen = subprocess.Popen(
            [sys.executable, "-m", "alignedserve.parts", spec.name],  # the name is for who looks at `ps`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher alone
        )
        assert popen.stdin is not None
        popen.stdin.write(spec.to_json().encode() + b"\n")
        popen.stdin.flush()  # and stays open: its end tells the part that we have gone
        self._processes[spec.name] = _Process(spec, popen, time.monotonic(), quick_deaths)
        threading.Thread(target=self._wait, args=(spec.name, popen), name=f"wait-{spec.name}", daemon=True).start()

    def _wait(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        popen.wait()
        self._happened.put(name)

    def _stop_all(self) -> None:
        """The gateway first: it drains, and the others are needed for that. A second signal ends the patience."""
        gateways = [one for one in self._processes.values() if one.spec.role is Role.GATEWAY]
        others = [one for one in self._processes.values() if one.spec.role is not Role.GATEWAY]
        self._stop(gateways, self._config.server.drain_s + GRACE_S)
        self._stop(others, GRACE_S)
        remove_stale(Path(self._config.kvpool.directory), PREFIX)

    def _stop(self, processes: list[_Process], patience_s: float) -> None:
        for one in processes:
            one.popen.terminate()
        deadline = time.monotonic() + patience_s
        while any(one.popen.poll() is None for one in processes) and time.monotonic() < deadline:
            try:
                if self._happened.get(timeout=deadline - time.monotonic()) is None:
                    break
            except queue.Empty:
                break
        for one in processes:
            one.popen.kill()
            one.popen.wait()


def no_ray() -> AlignedServeError:
    return AlignedServeError("the launcher ray needs Ray: pip install 'alignedserve[ray]'")
