"""A process that has loaded what other processes need, and forks them: torch and FastAPI are imported once.

    launcher ─ forks, while it has no thread that works ─▶ fork server, which imports
       │ request, with stdin and stdout ──────────────────────▶ │ forks a process that forks the part, and ends
       │ ◀───────────────────────────────────── pid of the part │
       └ adopts the part, as a subreaper: it waits for the part, and signals it, like any other child

So a part needs its fork server only to begin. The fork server never uses a GPU, has one thread when it forks, and knows
no configuration: what a user plugs in is loaded by the part itself.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from alignedserve.signs import Stage, growing

Load = Callable[[], None]
Main = Callable[[str], int]  # takes the request and returns the exit code

ANSWER_S = 30.0  # for a fork, once everything is loaded: then the fork server is given up
QUIET_S = 120.0  # the same between two signs that it loads
_MOST_BYTES = 1 << 16  # of a request
_MOST_FILES = 3
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


class ForkServerGone(Exception):
    """The fork server has ended, was closed, or does not answer."""


def adopt_orphans() -> bool:
    """Let processes below this one become its children when their parents end; return whether this system does that."""
    return sys.platform == "linux" and _prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def rename(title: str) -> None:
    """Show the title where `ps` would show the command of the process that forked this one."""
    encoded = title.encode()
    _prctl(_PR_SET_NAME, ctypes.c_char_p(encoded.rpartition(b" ")[2]))
    with suppress(OSError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # of the arguments, in the memory of this process
        if 0 < start < end:
            ctypes.memmove(start, encoded[: end - start - 1].ljust(end - start, b"\0"), end - start)


class ForkedProcess:
    """A process that a fork server has forked for this one, with the methods of subprocess.Popen that we use."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._lock = threading.Lock()
        self._code: int | None = None

    def wait(self) -> int:
        """Return the exit code when the process has ended, or minus the number of the signal that ended it."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:  # until here its pid belongs to no other process
            if self._code is None:
                try:
                    self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:  # it was killed before this process knew it, and buried as an orphan
                    self._code = -signal.SIGKILL
            return self._code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._code is None:
                os.kill(self.pid, number)


class ForkServer:
    """A fork server, for the process that asks it. One request is answered after the other."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid, self._link = pid, link
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._has_loaded = self._is_closed = False

    @classmethod
    def begin(cls, title: str, load: Load, main: Main) -> ForkServer:
        """Fork a fork server that calls `load` once, and `main` in each process that it forks.

        This process should have no other threads than those that wait in a system call."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launcher = os.getpid()
        pid = _fork()
        if not pid:
            _run(lambda: serve(theirs, launcher, title, load, main))
        theirs.close()
        return cls(pid, ours)

    def fork(self, request: str, loaded: Callable[[int], None] = lambda _: None) -> ForkedProcess:
        """Fork a process with pipes for its standard input and output. Until the fork server has loaded everything,
        `loaded` hears how many modules it has. Raises ForkServerGone, or OSError where the machine is full."""
        pipes = [os.pipe(), os.pipe()]
        (its_stdin, stdin), (stdout, its_stdout) = pipes
        try:
            pid = self.fork_with(request, (its_stdin, its_stdout), loaded)
        except BaseException:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            os.close(its_stdin)
            os.close(its_stdout)
        return ForkedProcess(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))

    def fork_with(self, request: str, files: Sequence[int], loaded: Callable[[int], None] = lambda _: None) -> int:
        """Fork a process that has these files as its first, and return its pid: it is a child of this process."""
        with self._lock:
            try:
                self._link.settimeout(ANSWER_S if self._has_loaded else QUIET_S)
                socket.send_fds(self._link, [request.encode()], files)
                while (said := self._link.recv(_MOST_BYTES).decode().split()) and said[0] == "modules":
                    loaded(int(said[1]))
            except OSError as error:
                raise ForkServerGone(str(error)) from None
            self._has_loaded = bool(said)
        match said:
            case "pid", pid:
                return int(pid)
            case "error", number:
                raise OSError(int(number), os.strerror(int(number)))
        raise ForkServerGone("it has ended")

    def close(self) -> None:
        """End the fork server, if it has not ended; what it has forked goes on."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        with self._lock:  # who waits for an answer sees the end of the link
            self._link.close()


# --- The fork server


def serve(link: socket.socket, launcher: int, title: str, load: Load, main: Main) -> int:
    """Be the fork server of this launcher until it ends; return the exit code."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # its parts see the end of their input
    if os.getppid() != launcher:
        return 0
    os.setsid()  # Ctrl-C reaches the launcher only
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    atexit._clear()  # that is for the launcher's end
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != link.fileno():
            with suppress(OSError):
                os.close(int(name))
    rename(title)
    gc.disable()  # imports leave little garbage, and to look for it takes a tenth of their time
    with growing(_Loading(link), lambda: len(sys.modules)):
        load()
    gc.freeze()  # a collection would write to all objects, and so copy the memory that is shared
    gc.enable()
    while True:
        request, files, _, _ = socket.recv_fds(link, _MOST_BYTES, _MOST_FILES)
        if not request:
            return 0
        answer = _forked(link, request.decode(), files, main)
        for file in files:
            os.close(file)
        link.send(answer.encode())


class _Loading:
    """Tells the launcher how many modules there are, as signs of life while they are imported."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._num_modules = link, 0

    def stage(self, stage: Stage, total: int = 0) -> None: ...

    def advance(self, done: int = 1) -> None:
        self._num_modules += done
        self._link.send(f"modules {self._num_modules}".encode())


def _forked(link: socket.socket, request: str, files: Sequence[int], main: Main) -> str:
    """Fork a process that this one is no parent of, and return what to answer."""
    try:
        reads, writes = os.pipe()
        between = _fork()
    except OSError as error:
        return f"error {error.errno}"
    if not between:
        os.close(reads)
        try:
            pid = _fork()
        except OSError as error:
            _answer(writes, f"error {error.errno}")
            os._exit(1)
        if pid:
            _answer(writes, f"pid {pid}")
            os._exit(0)
        os.close(writes)
        link.close()
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
        for file in files:
            if file >= len(files):
                os.close(file)
        _run(lambda: main(request))
    os.close(writes)
    said = os.read(reads, 64).decode()
    os.close(reads)
    os.waitpid(between, 0)  # from here on the launcher is the parent
    return said or f"error {errno.ECHILD}"


def _answer(writes: int, said: str) -> None:
    with suppress(BrokenPipeError):  # the launcher gave up, and has ended the process that asked
        os.write(writes, said.encode())


def _run(main: Callable[[], int]) -> NoReturn:
    """Run this to its end, and end the process as Python ends one, without the frames of the process that forked it."""
    code = 1
    try:
        code = main()
    except SystemExit as leaves:
        code = leaves.code if isinstance(leaves.code, int) else int(leaves.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with suppress(BaseException):
            threading._shutdown()  # pyrefly: ignore[missing-attribute]  # it waits for threads that are no daemons
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(code)


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # it is closed
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 3.12, at threads of numpy's library, which ends them at a fork
        return os.fork()


def _prctl(option: int, argument: object) -> int:
    return int(ctypes.CDLL(None).prctl(option, argument, 0, 0, 0))
