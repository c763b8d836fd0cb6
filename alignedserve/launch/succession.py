"""What a launcher that is killed leaves to the next one at its port: its parts, which go on meanwhile.

    launcher ── writes ──▶ record: settings, keys, the newest life and the process of each part
        ✗                     │ read by the next launcher at this port
    part, whose input ends ──▶ listens for a next launcher for OUTLIVE_S, and then ends

A next launcher that is asked for the same settings goes on with these parts: no weights are loaded again, and no stream
breaks. Parts of a version that has other settings are then replaced one after another. A launcher that is asked for
other values ends what was left, and starts its own parts. The record has the keys of the deployment's links: it lies
beside the launcher's own socket (shell/control.py), in a folder that only its user can open.
"""

from __future__ import annotations

import io
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from alignedserve.errors import AlignedServeError
from alignedserve.locks import locked, open_private
from alignedserve.machine.resources import LivingProcess
from alignedserve.protocol.messages import Life
from alignedserve.protocol.wire import VERSION
from alignedserve.shell.control import door_of, private_socket
from alignedserve.shell.link_keys import DeploymentKeys
from alignedserve.shell.links import remove_sockets
from alignedserve.shell.part import PartSpec

log = logging.getLogger(__name__)

OUTLIVE_S = 60.0  # on a busy machine a supervisor's next launcher took 17 s to come
LISTENS_S = 2.0  # a part that lives hears of its launcher's end, and listens, sooner than this
ENDS_S = 10.0  # for killed processes: a driver may hold one
_LOCK_S = 30.0  # for the record of a port
_LOOK_S = 0.05
UNKNOWN_CODE = "a code that only its own launcher was told"


def may_outlive() -> bool:
    """Return whether this system tells a process of the end of one that is not its child."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


# --- A launcher


@dataclass(frozen=True)
class LauncherRecord:
    """What the next launcher needs to go on."""

    launcher: LivingProcess
    asked: Mapping[str, Any]  # settings, as the launcher was given them
    keys: DeploymentKeys
    lives: Mapping[str, Life]  # the newest life of each part, also of those that have gone
    specs: tuple[PartSpec, ...]  # the parts that are to run
    processes: Mapping[str, LivingProcess]  # of the newest lives
    version: int = VERSION  # of the wire, between this launcher's parts and others
    has_served: bool = False  # whether the deployment has taken requests: it outlasts deaths of its parts then

    @property
    def living(self) -> dict[str, LivingProcess]:
        return {name: process for name, process in self.processes.items() if process.lives}


def asks_the_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether both have the same value for each setting that both versions know."""
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if not asks_the_same(old, new):
                return False
        elif old != new and not isinstance(old, Mapping) and not isinstance(new, Mapping):  # else it is another setting
            return False
    return True


def with_settings_of(record: LauncherRecord, asked: Mapping[str, Any]) -> LauncherRecord:
    """Return the record of another version with the settings that this version knows: those that are new as asked."""
    return replace(record, specs=tuple(replace(spec, config=_kept(spec.config, asked)) for spec in record.specs))


def _kept(values: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are asked for with the values that there are."""
    tree = dict(asked)
    for name in values.keys() & asked.keys():
        old, new = values[name], asked[name]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            tree[name] = _kept(old, new)
        elif not isinstance(old, Mapping) and not isinstance(new, Mapping):
            tree[name] = old
    return tree


class RecordFile:
    """The record of the deployment at a port. Nothing is written of one that no launcher could find again."""

    def __init__(self, port: int) -> None:
        self._path = door_of(port).with_suffix(".json") if port else None

    @property
    def is_kept(self) -> bool:
        return self._path is not None

    def write(self, record: LauncherRecord) -> None:
        """Replace the record; where that fails, as on a full disk, parts end with their launcher."""
        if self._path is None:
            return
        new = self._path.with_suffix(".new")
        try:
            with open(open_private(new), "wb") as file:
                file.truncate()
                file.write(msgspec.json.encode(record))
            new.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be written: a next launcher will not go on with these parts (%s)", self._path, error)
            self.remove()

    def read(self) -> LauncherRecord | None:
        """Return the record; None if there is none that this version understands."""
        if self._path is None:
            return None
        with suppress(OSError, ValueError, msgspec.MsgspecError):
            return msgspec.json.decode(self._path.read_bytes(), type=LauncherRecord)
        return None

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def claim(self) -> LauncherRecord | None:
        """Return what a launcher that has gone has left, as this launcher's; None where nothing lives, or the launcher
        does: the port is in use then."""
        me = LivingProcess.of(os.getpid())
        if self._path is None or me is None:
            return None
        with locked(self._path.with_suffix(".lock"), _LOCK_S):  # against another launcher that starts now
            record = self.read()
            if record is None or record.launcher.lives:
                return None
            if not record.living:
                self.remove()
                return None
            self.write(claimed := replace(record, launcher=me))
        return claimed

    def end_left(self) -> int:
        """End what a launcher that has gone has left, and return how many processes that were."""
        record = self.claim()
        if record is None:
            return 0
        end(living := record.living.values())
        self.remove()
        remove_sockets(record.specs[0].deployment)
        return len(living)


@dataclass
class LeftParts:
    """A record, and the processes of its parts that this launcher goes on with."""

    record: LauncherRecord
    processes: dict[str, LeftProcess] = field(default_factory=dict)
    is_other_version: bool = False  # with other settings: such parts would refuse what this launcher hands to them

    @classmethod
    def taken_over(cls, record: LauncherRecord) -> LeftParts:
        """Go on with each part that answers, and end all others: a worker needs all its ranks."""
        living, found, until = record.living, dict[str, LeftProcess](), time.monotonic() + LISTENS_S
        for spec in record.specs:
            process = living.get(spec.name)
            if process is not None:
                life = replace(spec, incarnation=record.lives[spec.worker].incarnation)
                if (link := _connect(life, until)) is not None and (left := LeftProcess.of(process, link)) is not None:
                    found[spec.name] = left
        lacking = {spec.worker for spec in record.specs if spec.name not in found}
        lost = {spec.name for spec in record.specs if spec.worker in lacking}
        for name in lost & found.keys():
            found.pop(name).close()
        end(process for name, process in living.items() if name not in found)
        return cls(record, found)


class LeftProcess:
    """A process that a launcher before this one had started, with the methods of subprocess.Popen that we use."""

    def __init__(self, pid: int, pidfd: int, link: socket.socket) -> None:
        self.pid, self._pidfd = pid, pidfd
        self.stdin: IO[bytes] = link.makefile("wb")
        self.stdout: IO[bytes] = io.BytesIO()  # what it says there, nobody hears
        link.close()  # `stdin` keeps it open

    @classmethod
    def of(cls, process: LivingProcess, link: socket.socket) -> LeftProcess | None:
        pidfd = _pidfd_of(process)
        return None if pidfd is None else cls(process.pid, pidfd, link)

    def wait(self) -> str:
        """Wait for the end of the process, whose exit code only its parent is told."""
        _has_ended(self._pidfd)
        return UNKNOWN_CODE

    def terminate(self) -> None:
        _signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        _signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let it go: it waits for yet another launcher."""
        self.stdin.close()
        os.close(self._pidfd)


def end(processes: Iterable[LivingProcess]) -> None:
    """End these processes, and return when they have ended, with all their threads."""
    pidfds = [pidfd for process in processes if (pidfd := _pidfd_of(process)) is not None]
    for pidfd in pidfds:
        _signal(pidfd, signal.SIGKILL)
    until = time.monotonic() + ENDS_S
    for pidfd in pidfds:
        _has_ended(pidfd, max(0.0, until - time.monotonic()))
        os.close(pidfd)


def _pidfd_of(process: LivingProcess) -> int | None:
    """Return a descriptor of the process; None if it has ended."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return None
    if process.lives:  # then the descriptor is of this process, and of none that has its pid now
        return pidfd
    os.close(pidfd)
    return None


def _has_ended(pidfd: int, within_s: float | None = None) -> bool:
    """Wait up to `within_s` until the process has ended, and return whether it has."""
    ends = select.poll()
    ends.register(pidfd, select.POLLIN)
    return bool(ends.poll(None if within_s is None else within_s * 1000))


def _signal(pidfd: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def _connect(spec: PartSpec, until: float) -> socket.socket | None:
    """Connect to a part whose launcher has gone, as soon as it listens."""
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(str(_door(spec)))
            return link
        except OSError:
            link.close()
        if time.monotonic() >= until:
            return None
        time.sleep(_LOOK_S)


# --- A part


def inputs(spec: PartSpec) -> Iterator[Iterator[bytes]]:
    """Yield the lines of the standard input of a part, and after its end those of each next launcher, as long as one
    comes."""
    with os.fdopen(0, "rb", closefd=False) as given:
        yield _lines(given)
    while spec.outlive_s > 0:
        log.warning(
            "the launcher has gone: this process goes on, and ends unless another comes in %g s", spec.outlive_s
        )
        try:
            door = _door(spec)
            with socket.socket(socket.AF_UNIX) as listener:
                door.unlink(missing_ok=True)
                listener.bind(str(door))
                listener.listen()
                listener.settimeout(spec.outlive_s)
                try:
                    link = listener.accept()[0]
                finally:
                    door.unlink(missing_ok=True)
        except TimeoutError:
            return
        except (AlignedServeError, OSError) as error:  # a full machine, or a TMPDIR with a long name
            log.warning("no other launcher can be heard: %s", error)
            return
        log.warning("another launcher is there")
        with link, link.makefile("rb") as given:
            yield _lines(given)


def _lines(given: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a launcher, until it ends or its connection breaks: either way another one may come."""
    with suppress(ConnectionError):
        yield from given


def _door(spec: PartSpec) -> Path:
    """Return the path of the socket at which this life of a part hears a next launcher."""
    return private_socket(f"{spec.deployment}-{spec.name}.{spec.incarnation}.next")
