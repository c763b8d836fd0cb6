"""One process, one part: builds the core, the shell and the hands of a role, and runs them.

Both launchers start the same parts. A launcher that starts processes writes the part's spec to its
standard input and keeps that open: when the launcher ends, however it ends, the part sees the end of
its input and ends too. On its standard output a part says one thing: what keeps it from running at all.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from alignedserve.capacity import Capacity, capacity
from alignedserve.clock import Clock
from alignedserve.commands import Command
from alignedserve.config import Config, parse
from alignedserve.core import Role
from alignedserve.errors import AlignedServeError, CastOut, DeviceLost, RankLost
from alignedserve.link_keys import LinkKeys
from alignedserve.links import Links, Pulse
from alignedserve.messages import Member, rank_suffix
from alignedserve.model_config import ModelConfig, read_config
from alignedserve.model_source import resolve
from alignedserve.shell import Core, Hands, Shell

log = logging.getLogger("alignedserve.parts")

USER_ERROR = 2  # exit code: starting again would not help
LAUNCHER_GONE = 3
CAST_OUT = 4  # the next life is welcome
RANK_LOST = 5  # so it is here
DEVICE_LOST = 6  # and here
_MIB = 1 << 20


@dataclass(frozen=True)
class PartSpec:
    """All that a part needs to know to start."""

    role: Role
    name: str
    node: str  # empty: the one where it is started, which fills it in, and `host` too
    deployment: str  # of all files in shared memory: their names begin with it
    host: str  # where the part's inbox listens
    router: str  # the router's address
    config: Mapping[str, Any]  # as `alignedserve.config.dump` made it
    incarnation: int | None = None  # None: the time at which the part starts
    rank: int = 0  # of a worker that shares its model with others, each a part: rank 0 is the worker to everybody else
    device: int = 0  # which GPU, where workers compute on some
    ranks_at: str = ""  # host:port, where the ranks of this worker meet
    keys: LinkKeys | None = None  # of all links; none where they stay on this machine
    door: str = ""  # of the launcher, for who asks it for more workers or fewer (control.py)

    @property
    def worker(self) -> str:
        """The name of rank 0."""
        return self.name.removesuffix(rank_suffix(self.rank))

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"role": self.role.value})

    @classmethod
    def from_json(cls, text: str) -> PartSpec:
        read = json.loads(text)
        keys = read["keys"]
        return cls(**(read | {"role": Role(read["role"]), "keys": LinkKeys(**keys) if keys else None}))


def lock_name(deployment: str, holder: str, rank: int = 0) -> str:
    """Each rank of a holder writes to its pages, so each has a lock of its own."""
    return f"{deployment}-{holder}{rank_suffix(rank)}"


class Place:
    """What a spec says of where its part is and what it works on."""

    def __init__(self, spec: PartSpec) -> None:
        self.spec = spec
        self.config: Config = parse(spec.config)
        self.incarnation = spec.incarnation or time.time_ns()

    @property
    def shared_memory(self) -> Path:
        return Path(self.config.kvpool.directory)

    def arena_path(self, rank: int = 0) -> Path:
        return self.shared_memory / f"{self.spec.deployment}-{self.spec.node}{rank_suffix(rank)}"

    @property
    def folder(self) -> Path:
        return resolve(self.config.model)

    def capacity(self) -> tuple[ModelConfig, Capacity]:
        model = read_config(self.folder)
        return model, capacity(self.config, model)


class Part(Place):
    """A part that is set up: its inbox listens, and `run` makes it a member."""

    def __init__(self, spec: PartSpec) -> None:
        super().__init__(spec)
        self.clock = Clock()
        bind = spec.router if spec.role is Role.ROUTER else f"tcp://{spec.host}:*"
        most_bytes = self.config.wire.max_frame_mb * _MIB
        self.links = Links(spec.name, self.incarnation, bind, spec.router, most_bytes, spec.keys)
        self.member = Member(spec.name, spec.role, spec.node, self.incarnation, self.links.address)

    def shell(self, core: Core, hands: Hands | None = None) -> Shell:
        return Shell(core, self.links, self.clock, hands)

    def run(self, shell: Shell, first: list[Command] | None = None) -> None:
        """Until the shell is stopped."""
        pulse = None
        if self.spec.role is not Role.ROUTER:
            pulse = Pulse(self.member, self.spec.router, self.config.wire.heartbeat_s, self.spec.keys)
        try:
            shell.run(first or [])
        finally:
            if pulse is not None:
                pulse.stop()
            self.links.close()


class Stoppable(Protocol):
    def stop(self) -> None:
        """From any thread, also before it runs."""


OnStart = Callable[[Stoppable], None]  # gets what can be stopped, before it runs


def start(spec: PartSpec, on_start: OnStart) -> None:
    """Build the part of this role and run it until it is stopped."""
    # What a role needs is imported by the process that has the role: torch and FastAPI are heavy.
    _wait_calmly()
    if spec.rank:
        from alignedserve.engine_hands import run_rank

        run_rank(Place(spec))
        return
    part = Part(spec)
    if spec.role is Role.ROUTER:
        from alignedserve.router.actor import run
    elif spec.role is Role.POOL:
        from alignedserve.kvpool.actor import run
    elif spec.role is Role.PREFILL:
        from alignedserve.prefill_worker.actor import run
    elif spec.role is Role.DECODE:
        from alignedserve.decode_worker.actor import run
    elif spec.role is Role.JOBS:
        from alignedserve.jobs.actor import run
    else:
        from alignedserve.gateway.actor import run
    run(part, on_start)


def _wait_calmly() -> None:
    """Before torch is loaded: its threads soon sleep where they wait. Others share their cores (docs/kernels.md)."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _end_with_launcher() -> None:
    """Ends this process when its standard input does."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        log.warning("the launcher has gone")
        os._exit(LAUNCHER_GONE)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


class _OnSigterm:
    """Stops the part that it was given, or ends a process that has none yet.

    A thread waits for the signal, since a handler runs only between two lines of Python: it would come too
    late for a main thread that zmq_poll, busy with a command of its own as the signal came, puts back to sleep.
    """

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in every thread that starts after this line
        self._part: Stoppable | None = None
        threading.Thread(target=self._wait, name="sigterm", daemon=True).start()

    def __call__(self, part: Stoppable) -> None:
        self._part = part

    def _wait(self) -> None:
        signal.sigwait({signal.SIGTERM})
        if self._part is None:
            os._exit(0)
        self._part.stop()


def _take_stdout() -> int:
    """Standard output, for ourselves and no child: what others print goes to standard error."""
    taken = os.dup(1)
    os.dup2(2, 1)
    return taken


def main() -> int:
    stdout = _take_stdout()
    with os.fdopen(0, "rb", buffering=0, closefd=False) as given:  # unbuffered: the rest is for the watch
        spec = PartSpec.from_json(given.readline().decode())
    from alignedserve.logs import set_up

    set_up(parse(spec.config).log, spec.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's to handle
    on_sigterm = _OnSigterm()
    _end_with_launcher()
    try:
        start(spec, on_sigterm)
    except CastOut as error:
        log.error("%s", error)
        return CAST_OUT
    except RankLost as error:
        log.error("%s", error)
        return RANK_LOST
    except DeviceLost as error:
        log.error("%s", error)
        return DEVICE_LOST
    except AlignedServeError as error:
        os.write(stdout, str(error).encode())
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
