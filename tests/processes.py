"""Several processes run the tests that one has collected: they are forked from it, so that nothing is imported twice.

    pytest --processes 3

Each process takes a group of tests after the other, and what it reports is told here as if it had run here. One that a
test has ended is replaced. Warnings of tests are not told.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

_FORKING = multiprocessing.get_context("fork")
_ENDS_S = 120.0  # for deployments that a process has started to end with it
# They tell the user, or write files, what the process that forks hears from all.
_TELL = ("terminalreporter", "lfplugin", "nfplugin", "stepwiseplugin", "junitxml")

Group = Sequence[pytest.Item]


@dataclass(eq=False)
class _Process:
    """A process with the groups that it has: the one that it runs, and the one that follows."""

    name: str
    process: BaseProcess
    connection: Connection
    groups: deque[list[pytest.Item]] = field(default_factory=deque)
    running: pytest.Item | None = None


class Processes:
    """Hands out groups of tests to processes.

    `groups_of` divides what was collected, in the order in which groups are handed out; `prepare` runs before the
    processes are forked, and `at_end` in each with its name when it has run its last test.
    """

    def __init__(
        self,
        groups_of: Callable[[Sequence[pytest.Item]], Sequence[Group]],
        prepare: Callable[[Sequence[Group]], None],
        at_end: Callable[[pytest.Config, str], None],
    ) -> None:
        self._groups_of, self._prepare, self._at_end = groups_of, prepare, at_end
        self._waiting = deque[list[pytest.Item]]()
        self._processes: list[_Process] = []
        self._num_begun = 0

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--processes", type=int, default=1, help="in how many processes the tests run")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        number = session.config.option.processes
        if number < 2 or session.testsfailed or session.config.option.collectonly:
            return None
        groups = self._groups_of(session.items)
        self._prepare(groups)
        self._waiting = deque(map(list, groups))
        reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
        reporter.showfspath = False  # they would alternate
        try:
            while len(self._processes) < number and self._waiting:
                self._begin(session)
            while self._processes:
                for ready in wait([each.connection for each in self._processes]):
                    self._hear(session, next(each for each in self._processes if each.connection is ready))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            self._end()
        return True

    def _begin(self, session: pytest.Session) -> None:
        ours, its = _FORKING.Pipe()
        name, self._num_begun = f"p{self._num_begun}", self._num_begun + 1
        others = [ours, *(each.connection for each in self._processes)]
        process = _FORKING.Process(target=self._run, args=(session, name, its, others), name=name)
        process.start()
        its.close()
        self._processes.append(begun := _Process(name, process, ours))
        self._hand_out(begun)

    def _hand_out(self, to: _Process) -> None:
        group = self._waiting.popleft() if self._waiting else None
        if group is not None:
            to.groups.append(group)
        to.connection.send(None if group is None else [item.nodeid for item in group])

    def _hear(self, session: pytest.Session, process: _Process) -> None:
        try:
            kind, value = process.connection.recv()
        except (EOFError, ConnectionError):
            self._processes.remove(process)
            process.process.join()
            if process.running is not None or process.groups:
                self._replace(session, process)
            return
        hook = session.config.hook
        if kind == "group":
            self._hand_out(process)
        elif kind == "begins":
            process.running = process.groups[0].pop(0)
            hook.pytest_runtest_logstart(nodeid=process.running.nodeid, location=process.running.location)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif process.running is not None:
            hook.pytest_runtest_logfinish(nodeid=process.running.nodeid, location=process.running.location)
            process.running = None
            if not process.groups[0]:
                process.groups.popleft()

    def _replace(self, session: pytest.Session, ended: _Process) -> None:
        """Report the test that has ended its process as failed, and let another process run what it had yet to run."""
        if (item := ended.running) is not None:
            what = f"it ended the process that ran it, with exit code {ended.process.exitcode}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", what, "call")
            session.config.hook.pytest_runtest_logreport(report=report)
        self._waiting.extendleft(reversed([group for group in ended.groups if group]))
        if self._waiting:
            self._begin(session)

    def _end(self) -> None:
        """End the processes that still run: the run was interrupted."""
        for each in self._processes:
            each.connection.close()
            with suppress(ProcessLookupError):
                os.kill(each.process.pid or 0, signal.SIGINT)
        for each in self._processes:
            each.process.join(_ENDS_S)
            each.process.kill()

    # --- in a process

    def _run(self, session: pytest.Session, name: str, connection: Connection, others: list[Connection]) -> None:
        atexit._clear()  # that is for the process that forked
        for other in others:
            other.close()
        session.config.option.processes = 1
        items = {item.nodeid: item for item in session.items}
        tells = _Tells(session.config, connection)
        with _apart(session.config, tells), suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
            try:
                for item, following in _with_next(tells.groups(), items):
                    session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except (KeyboardInterrupt, EOFError, BrokenPipeError):
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, after that of the process that forked
                session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()
        self._at_end(session.config, f"-{name}")


def _with_next(
    groups: Iterator[list[str]], items: dict[str, pytest.Item]
) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Yield each test with the one that follows: what both share is not torn down between them."""
    names = (name for group in groups for name in group)
    name = next(names, None)
    while name is not None:
        following = next(names, None)
        yield items[name], None if following is None else items[following]
        name = following


class _Tells:
    """A plugin that tells the process that forked what becomes of the tests."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def groups(self) -> Iterator[list[str]]:
        """Yield the names of each group."""
        while (group := self._connection.recv()) is not None:
            yield group
            self._connection.send(("group", None))

    def pytest_runtest_logstart(self) -> None:
        self._connection.send(("begins", None))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_runtest_logfinish(self) -> None:
        self._connection.send(("ended", None))


@contextmanager
def _apart(config: pytest.Config, tells: _Tells) -> Iterator[None]:
    """Let this process tell all by the plugin, and capture output in files of its own."""
    plugins: Any = config.pluginmanager
    for name in _TELL:
        if plugins.has_plugin(name):
            plugins.unregister(name=name)
    plugins.register(tells)
    capturing = plugins.getplugin("capturemanager")
    capturing.stop_global_capturing()
    capturing.start_global_capturing()
    capturing.suspend_global_capture()
    yield
    capturing.stop_global_capturing()
