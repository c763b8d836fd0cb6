"""What a launcher that was killed leaves, and how the next one goes on with it. Real processes stand for parts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.config import dump, load, parse
from alignedserve.core import Role
from alignedserve.launch import succession
from alignedserve.launch.succession import (
    LauncherRecord,
    LeftParts,
    LivingProcess,
    RecordFile,
    asks_the_same,
    inputs,
    with_settings_of,
)
from alignedserve.protocol.messages import Life
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.link_keys import DeploymentKeys
from alignedserve.shell.part import PartSpec
from alignedserve.signs import ExitCode
from tests.launch.keepers import ScriptedDeployment, specs_of

FORKING = multiprocessing.get_context("fork")
ASKED = {"model": "demo"}
ANSWER_S = 30.0
LONG_S = 600.0
PORT = 8000


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # or that of all later tests would be in this folder
    with tempfile.TemporaryDirectory() as folder:  # names of sockets are short
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def spec_of(name: str, rank: int = 0) -> PartSpec:
    at = ("local", "alignedserve-test", "127.0.0.1", "tcp://127.0.0.1:9")
    return PartSpec(Role(name.partition("-")[0]), name, *at, {}, ClockOrigin.read(), rank=rank)


class APart:
    """A process that takes what launchers write, as a part does, and tells it here."""

    def __init__(
        self,
        spec: PartSpec,
        outlive_s: float,
        listens: bool = True,
        link: Callable[[], tuple[int, int]] = os.pipe,
    ) -> None:
        self.spec = spec
        reads, self._writes = link()
        self._heard, heard = FORKING.Pipe(duplex=False)
        target = _part if listens else _deaf
        self.process: BaseProcess = FORKING.Process(
            target=target, args=(reads, self._writes, replace(spec, incarnation=3, outlive_s=outlive_s), heard)
        )
        self.process.start()
        os.close(reads)
        heard.close()
        pid = self.process.pid
        assert pid is not None
        found = LivingProcess.of(pid)
        assert found is not None
        self.found = found

    def lose_launcher(self) -> None:
        os.close(self._writes)

    def heard(self) -> str:
        assert self._heard.poll(ANSWER_S)
        return str(self._heard.recv())

    @property
    def exit_code(self) -> int | None:
        self.process.join(ANSWER_S)
        return self.process.exitcode


def _part(reads: int, writes: int, spec: PartSpec, heard: Connection) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # another test may have blocked it here, or taken it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(writes)
    os.dup2(reads, 0)
    for given in inputs(spec):
        for line in given:
            heard.send(line.decode().strip())


def _deaf(reads: int, writes: int, spec: PartSpec, heard: Connection) -> None:  # noqa: ARG001
    signal.pause()


def resetting() -> tuple[int, int]:
    """Return the two ends of a connection that is reset when the second one is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        reads = socket.create_connection(server.getsockname())
        writes, _ = server.accept()
    writes.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return reads.detach(), writes.detach()


@pytest.fixture
def begin() -> Iterator[Callable[..., APart]]:
    begun: list[APart] = []

    def one(spec: PartSpec, outlive_s: float = LONG_S, **how: Any) -> APart:
        begun.append(APart(spec, outlive_s, **how))
        return begun[-1]

    yield one
    for part in begun:
        part.process.kill()
        part.process.join()


def ended_process() -> LivingProcess:
    process = FORKING.Process(target=int)
    process.start()
    found = LivingProcess.of(process.pid or 0)
    process.join()
    return found or LivingProcess(process.pid or 0, 1)


def record_of(*parts: APart, launcher: LivingProcess | None = None) -> LauncherRecord:
    specs = tuple(part.spec for part in parts)
    lives = {spec.worker: Life(spec.worker, spec.acts_as, 3) for spec in specs}
    processes = {part.spec.name: part.found for part in parts}
    return LauncherRecord(launcher or ended_process(), ASKED, DeploymentKeys.new(), lives, specs, processes)


def test_a_process_is_known_from_another_with_its_pid_later() -> None:
    me = LivingProcess.of(os.getpid())
    assert me is not None
    assert me.lives
    assert not replace(me, began=me.began + 1).lives
    assert not ended_process().lives


class TestParts:
    def test_a_part_goes_on_with_one_launcher_after_the_other(self, begin: Callable[..., APart]) -> None:
        part = begin(spec_of("pool-0"))
        part.lose_launcher()
        for number in range(2):
            left = LeftParts.taken_over(record_of(part))
            process = left.processes["pool-0"]
            assert process.pid == part.process.pid
            with process.stdin:
                process.stdin.write(f"settings {number}\n".encode())
            assert part.heard() == f"settings {number}"
        LeftParts.taken_over(record_of(part)).processes["pool-0"].terminate()
        assert part.exit_code == -signal.SIGTERM

    def test_a_part_whose_launcher_s_connection_was_reset_waits_for_the_next(self, begin: Callable[..., APart]) -> None:
        part = begin(spec_of("pool-0"), link=resetting)
        part.lose_launcher()
        with LeftParts.taken_over(record_of(part)).processes["pool-0"].stdin as stdin:
            stdin.write(b"settings\n")
        assert part.heard() == "settings"

    @pytest.mark.parametrize(("outlive_s", "where"), [(0.0, ""), (0.05, ""), (LONG_S, "/long" * 30)])
    def test_a_part_ends_where_no_launcher_comes_or_can_come(
        self, begin: Callable[..., APart], monkeypatch: pytest.MonkeyPatch, outlive_s: float, where: str
    ) -> None:
        (folder := Path(f"{tempfile.gettempdir()}{where}")).mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        part = begin(spec_of("pool-0"), outlive_s)
        part.lose_launcher()
        assert part.exit_code == 0

    def test_the_end_of_a_part_is_heard_though_it_is_no_child(self, begin: Callable[..., APart]) -> None:
        part = begin(spec_of("pool-0"))
        part.lose_launcher()
        process = LeftParts.taken_over(record_of(part)).processes["pool-0"]
        ends = list[str]()
        waiting = threading.Thread(target=lambda: ends.append(process.wait()))
        waiting.start()
        process.kill()
        waiting.join(ANSWER_S)
        assert ends == [succession.UNKNOWN_CODE]
        part.process.join()
        process.kill()  # another process may have its pid now

    def test_one_that_does_not_answer_is_ended(
        self, begin: Callable[..., APart], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(succession, "LISTENS_S", 0.1)
        part = begin(spec_of("pool-0"), listens=False)
        assert not LeftParts.taken_over(record_of(part)).processes
        assert part.exit_code == -signal.SIGKILL

    def test_ranks_that_lack_another_are_ended(
        self, begin: Callable[..., APart], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(succession, "LISTENS_S", 1.0)
        ranks = [begin(spec_of(name, rank)) for rank, name in enumerate(("decode-0", "decode-0-rank-1"))]
        for part in ranks:
            part.lose_launcher()
        ranks[1].process.kill()
        ranks[1].process.join()
        assert not LeftParts.taken_over(record_of(*ranks)).processes
        assert ranks[0].exit_code == -signal.SIGKILL

    def test_one_that_was_to_retire_is_ended(self, begin: Callable[..., APart]) -> None:
        leaves, stays = begin(spec_of("decode-1")), begin(spec_of("decode-0"))  # a fork keeps the pipes of those before
        stays.lose_launcher()
        record = record_of(stays, leaves)
        assert LeftParts.taken_over(replace(record, specs=record.specs[:1])).processes.keys() == {"decode-0"}
        assert leaves.exit_code == -signal.SIGKILL


class TestRecord:
    def test_it_is_had_by_one_launcher_and_only_after_the_end_of_the_one_before(
        self, begin: Callable[..., APart]
    ) -> None:
        file, part = RecordFile(PORT), begin(spec_of("pool-0"))
        file.write(record := record_of(part))
        claimed = file.claim()
        assert claimed is not None
        assert claimed.launcher == LivingProcess.of(os.getpid())
        assert claimed == replace(record, launcher=claimed.launcher)
        assert file.claim() is None, "this process lives"
        assert file.end_left() == 0
        assert part.found.lives

    def test_where_nothing_lives_there_is_nothing_to_go_on_with(self) -> None:
        file = RecordFile(PORT)
        file.write(replace(record_of(), processes={"pool-0": ended_process()}))
        assert file.claim() is None
        assert file.read() is None

    def test_what_was_left_is_ended_where_that_is_asked(self, begin: Callable[..., APart]) -> None:
        file, part = RecordFile(PORT), begin(spec_of("pool-0"))
        file.write(record_of(part))
        assert file.end_left() == 1
        assert part.exit_code == -signal.SIGKILL
        assert file.read() is None

    @pytest.mark.parametrize("written", [b"", b"{", b'{"launcher": 1}', b"\xff"])
    def test_what_is_no_record_is_none(self, written: bytes) -> None:
        file = RecordFile(PORT)
        file.write(record_of())
        (path,) = Path(tempfile.gettempdir()).glob(f"*/{PORT}.json")
        assert path.stat().st_mode & 0o077 == 0
        path.write_bytes(written)
        assert file.read() is None
        assert file.claim() is None

    def test_at_no_fixed_port_none_is_kept(self) -> None:
        file = RecordFile(0)
        file.write(record_of())
        assert not file.is_kept
        assert file.read() is None
        assert file.claim() is None


@pytest.mark.usefixtures("own_door")
def test_the_next_launcher_keeps_lives_that_run_and_starts_the_others_anew() -> None:
    config = load({"topology": "1+1"}, {}, None)
    specs = tuple(specs_of(config))
    lives = {spec.name: Life(spec.name, spec.acts_as, 4) for spec in specs}
    record = LauncherRecord(ended_process(), ASKED, keys := DeploymentKeys.new(), lives, specs, {})
    running: Mapping[str, object] = dict.fromkeys(name for name in lives if name != "decode-0")
    kept = ScriptedDeployment(
        config,
        lambda _, spec: signal.raise_signal(signal.SIGTERM) if spec.name == "jobs-0" else None,
        LeftParts(record, running),  # pyrefly: ignore[bad-argument-type]  # it starts nothing
    )
    kept.run()
    assert {spec.name: spec.incarnation for spec in kept.started} == dict.fromkeys(lives, 4) | {"decode-0": 5}
    assert all(spec.keys == keys.parts for spec in kept.started)


@pytest.mark.parametrize(("has_served", "code"), [(True, ExitCode.STOPPED), (False, ExitCode.BROKEN)])
def test_the_next_launcher_of_a_deployment_that_has_served_does_not_end_it_for_deaths_before_it_serves(
    has_served: bool, code: ExitCode
) -> None:
    """Three quick deaths end a deployment that never took a request, and no other."""
    config = load({"topology": "1+1"}, {}, None)
    specs = tuple(specs_of(config))
    lives = {spec.name: Life(spec.name, spec.acts_as, 4) for spec in specs}
    record = LauncherRecord(ended_process(), ASKED, DeploymentKeys.new(), lives, specs, {}, has_served=has_served)

    def on_start(kept: ScriptedDeployment, spec: PartSpec) -> None:
        if spec.name == "router":
            kept.die(spec)
        if kept.lives("router")[-1:] == [9]:
            signal.raise_signal(signal.SIGTERM)

    assert ScriptedDeployment(config, on_start, LeftParts(record, {})).run() == code


def test_a_record_says_whether_the_deployment_has_served() -> None:
    (file := RecordFile(PORT)).write(record := replace(record_of(), has_served=True))
    assert file.read() == record


class TestAnotherVersion:
    """A version that has one setting more than the version before, and one less."""

    NOW = dump(load({"server.drain_s": 9.0}, {}, None))

    def of_before(self, drain_s: float = 9.0) -> dict[str, Any]:
        without = {name: value for name, value in self.NOW["server"].items() if name != "cors_origins"}
        return self.NOW | {"server": without | {"drain_s": drain_s, "gone_s": 1.0}, "old": {"gone": True}}

    def test_what_both_know_has_to_be_asked_alike(self) -> None:
        assert asks_the_same(self.of_before(), self.NOW)
        assert not asks_the_same(self.of_before(drain_s=8.0), self.NOW)

    def test_parts_get_the_settings_of_the_next_version_and_keep_what_was_planned(self) -> None:
        planned = self.of_before() | {"model": "/planned"}
        before = replace(record_of(), specs=(replace(spec_of("decode-0"), config=planned),))
        (spec,) = with_settings_of(before, self.NOW | {"server": self.NOW["server"] | {"cors_origins": "*"}}).specs
        config = parse(spec.config)
        assert (config.model, config.server.drain_s, config.server.cors_origins) == ("/planned", 9.0, "*")

    def test_within_a_version_nothing_changes(self) -> None:
        before = replace(record_of(), specs=(replace(spec_of("decode-0"), config=self.NOW),))
        assert with_settings_of(before, self.NOW) == before
