"""The host that runs each part as a process of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from signal import Signals
from typing import TypeAlias

from alignedserve.core import WORKERS, Role
from alignedserve.launch import start
from alignedserve.launch.fork_server import ForkedProcess, ForkServer, ForkServerGone, adopt_orphans, rename
from alignedserve.launch.host import Events, Host, PartBegan, say
from alignedserve.launch.keeper import GRACE_S
from alignedserve.launch.succession import LeftParts, LeftProcess
from alignedserve.safe_path import module_command
from alignedserve.shell.part import PartSpec
from alignedserve.signs import ExitCode, Sign, Stage

ForkServers: TypeAlias = Mapping[bool, ForkServer]  # one for workers, and one, without torch, for all other parts
_Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess | LeftProcess"


@contextmanager
def fork_servers(is_wanted: bool = True) -> Iterator[ForkServers]:
    """Yield the fork servers of a launcher, which has no threads yet. They load while it prepares the deployment."""
    with ExitStack() as ends:
        servers: dict[bool, ForkServer] = {}
        with suppress(OSError):  # a full machine forks nothing
            if is_wanted and adopt_orphans():
                for of_workers, title in ((True, "workers"), (False, "other parts")):
                    roles = [role for role in Role if (role in WORKERS) is of_workers]
                    server = ForkServer.begin(
                        f"alignedserve: fork server of {title}", partial(start.load, roles), _part
                    )
                    servers[of_workers] = ends.enter_context(closing(server))
        yield servers


def _part(name: str) -> int:
    rename(f"alignedserve: {name}")
    return start.main()


class _PartProcess:
    """The process of one life of a part. It may have yet to be forked: then its end is that it never begins."""

    def __init__(self, spec: PartSpec, events: Events) -> None:
        self.spec, self._events = spec, events
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._process: _Process | None = None
        self.is_over = False
        self._has_ended = threading.Event()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def is_wanted(self, process: _Process) -> bool:
        """Note the process; end it if the part was ended before it was there."""
        with self._lock:
            self._process = process
            if self.is_over:
                process.kill()
            return not self.is_over

    def tell(self) -> None:
        """Write the spec to the part: it begins with the first, and takes new settings from those that follow."""
        with self._telling, suppress(BrokenPipeError, ValueError):  # it has ended already
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write(self.spec.to_json().encode() + b"\n")
                self._process.stdin.flush()

    def say_ended(self, how: object, failure: str = "") -> None:
        with self._lock:
            was_over, self.is_over = self.is_over, True
        if not was_over:
            self._events.ended(self.spec, how, failure)
        self._has_ended.set()

    def signal(self, number: Signals) -> None:
        """Send the signal, or let the process never begin. Wait a moment for the end of one that is killed."""
        with self._lock:
            process = self._process
            if process is not None:
                process.kill() if number is signal.SIGKILL else process.terminate()
        if process is None:
            self.say_ended(-number)
        elif number is signal.SIGKILL:
            self._has_ended.wait(GRACE_S)  # one that waits for a driver or a disk does not end


class ProcessHost(Host):
    """Runs every part as a child process."""

    def __init__(self, servers: ForkServers | None = None, left: LeftParts | None = None) -> None:
        """`left` has the processes that another launcher has left."""
        super().__init__()
        self._left_processes = left.processes if left else {}
        self._servers = dict(servers or {})
        self._adopts = bool(servers)
        self._processes: dict[str, _PartProcess] = {}

    def start(self, spec: PartSpec) -> None:
        part = _PartProcess(spec, self.events)
        # A full machine gives no thread. Then no process begins either, whose end nobody would hear.
        threading.Thread(target=self._run, args=(spec, part), name=f"part-{spec.name}", daemon=True).start()
        self._processes[spec.name] = part
        self._loads(part, 0)

    def _loads(self, part: _PartProcess, num_modules: int) -> None:
        self.events.put(Sign(part.spec.name, part.spec.incarnation, Stage.LIBRARIES, num_modules))

    def _run(self, spec: PartSpec, part: _PartProcess) -> None:
        """Begin the process of a part, and wait for its end."""
        try:
            process = self._begin(spec, part)
        except OSError as error:
            return part.say_ended(error)
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError), process.stdin, process.stdout:  # what it has not read is written as this ends
            if part.is_wanted(process):
                self.events.put(PartBegan(spec.name, spec.incarnation))
                part.tell()  # its input stays open: its end tells the part that the launcher has gone
            code = process.wait()
            part.say_ended(code, process.stdout.read().decode() if code == ExitCode.USER_ERROR else "")
        self._bury_orphans()
        return None

    def _begin(self, spec: PartSpec, part: _PartProcess) -> _Process | None:
        """Return the process that another launcher has left. Else fork the part, or start it plainly where there is no
        fork server; return None if it was ended meanwhile."""
        if (left := self._left_processes.pop(spec.name, None)) is not None:
            return left

        def loaded(num_modules: int) -> None:
            for waiting in [*self._processes.values()]:
                if waiting.pid is None:
                    self._loads(waiting, num_modules)

        server = self._servers.get(is_worker := spec.role in WORKERS)
        if server is not None:
            try:
                return server.fork(spec.name, loaded)
            except ForkServerGone:
                if part.is_over:
                    return None
                self._give_up(is_worker)
        return subprocess.Popen(
            module_command("alignedserve.launch.start", spec.name),  # the name is for readers of `ps`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the launcher only
        )

    def _give_up(self, is_worker: bool) -> None:
        """Start such parts without the fork server, which has ended."""
        server = self._servers.get(is_worker)
        if server is not None:
            server.close()
            if self._servers.pop(is_worker, None) is not None:
                say("a fork server has ended: parts are started without it, and each loads its own libraries")

    def _bury_orphans(self) -> None:
        """Wait for ended processes that a part had started: this process has adopted them."""
        if not self._adopts:
            return
        servers = {server.pid: is_worker for is_worker, server in [*self._servers.items()]}
        parts = {part.pid for part in [*self._processes.values()]}
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in parts:  # another thread waits for it, and comes here then
                    return
                if ended.si_pid in servers:  # nobody waits for it, and those that ended later come behind it
                    self._give_up(servers[ended.si_pid])
                else:
                    os.waitpid(ended.si_pid, 0)

    def pids(self) -> Mapping[str, int]:
        return {name: part.pid for name, part in self._processes.items() if part.pid and not part.is_over}

    def ask_to_stop(self, parts: Collection[str]) -> None:
        for part in self._processes.keys() & parts:
            self._processes[part].signal(signal.SIGTERM)

    def hand_on(self, spec: PartSpec) -> None:
        part = self._processes.get(spec.name)
        if part is not None:  # or it could never be started
            part.spec = spec
            # A part that hangs reads nothing, and its pipe may be full.
            threading.Thread(target=part.tell, name=f"settings-{spec.name}", daemon=True).start()

    def end(self, part: str) -> None:
        if part in self._processes:  # or it could never be started
            self._processes[part].signal(signal.SIGKILL)
