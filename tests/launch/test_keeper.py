"""What the keeper does when parts end."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from alignedserve.config.choices import LogLevel
from alignedserve.config.config import Config, load, parse
from alignedserve.errors import AlignedServeError
from alignedserve.launch import deployment, keeper
from alignedserve.launch.host import NoAnswer
from alignedserve.shell.control import HeardOrder, LauncherOrder, door_of, tell
from alignedserve.shell.part import PartSpec
from alignedserve.signs import ExitCode, Sign, Stage
from tests.launch.keepers import ScriptedDeployment

pytestmark = pytest.mark.usefixtures("own_door")


def config_of(topology: str, **others: object) -> Config:
    return load({"topology": topology, **{name.replace("__", "."): value for name, value in others.items()}}, {}, None)


def stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def dying(*parts: str, lives: int) -> Callable[[ScriptedDeployment, PartSpec], None]:
    """Let each life of these parts end at once, and stop when the first has had so many."""

    def on_start(kept: ScriptedDeployment, spec: PartSpec) -> None:
        if spec.name in parts:
            kept.die(spec)
        if kept.lives(parts[0])[-1:] == [lives]:
            stop()

    return on_start


@pytest.mark.parametrize("step_s", [-600.0, 600.0])
def test_each_life_has_a_larger_incarnation_whatever_the_wall_clock_does(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    monkeypatch.setattr(keeper, "QUICK_DEATH_S", 0.0)
    wall, wall_ns, ahead_s = time.time, time.time_ns, [0.0]
    monkeypatch.setattr(time, "time", lambda: wall() + ahead_s[0])
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(ahead_s[0] * 1e9))

    def on_start(kept: ScriptedDeployment, spec: PartSpec) -> None:
        ahead_s[0] += step_s
        if spec.name == "router" and len(kept.lives("router")) < 5:
            kept.die(spec)
        elif spec.name == "router":
            stop()

    kept = ScriptedDeployment(config_of("1+1"), on_start)
    assert kept.run() == ExitCode.STOPPED
    lives = kept.lives("router")
    assert len(lives) == 5
    assert lives == sorted(set(lives))
    assert all(kept.lives(part) == [1] for part in ("pool-0", "prefill-0", "decode-0", "gateway-0"))


def test_the_router_knows_all_parts_that_start_with_it() -> None:
    """A part with little to load is heard before the launcher is."""
    kept = ScriptedDeployment(config_of("1+1"), lambda _, spec: stop() if spec.name == "jobs-0" else None)
    assert kept.run() == ExitCode.STOPPED
    assert {life.name for life in kept.started[0].lives} == {spec.name for spec in kept.started}


def test_a_job_runner_that_does_not_stay_up_is_started_again_after_longer_and_longer_pauses() -> None:
    """Chats need no job runner."""
    kept = ScriptedDeployment(config_of("1+1"), dying("jobs-0", lives=12))
    assert kept.run() == ExitCode.STOPPED
    assert kept.pauses_s[:9] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    assert all(kept.lives(part) == [1] for part in ("router", "pool-0", "prefill-0", "decode-0", "gateway-0"))


@pytest.mark.parametrize("part", ["prefill-1", "decode-1", "gateway-1"])
def test_a_part_that_others_can_stand_in_for_ends_nothing(part: str) -> None:
    kept = ScriptedDeployment(config_of("2+2", server__gateways=2), dying(part, lives=6))
    assert kept.run() == ExitCode.STOPPED
    assert kept.pauses_s[:3] == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("part", ["router", "pool-0", "prefill-0", "decode-0", "gateway-0"])
def test_the_deployment_ends_with_a_part_that_nothing_can_be_served_without(part: str) -> None:
    kept = ScriptedDeployment(config_of("1+1"), dying(part, lives=99))
    assert kept.run() == ExitCode.BROKEN
    assert kept.lives(part) == [1, 2, 3]
    assert kept.pauses_s == []


def test_while_ray_does_not_answer_no_part_is_given_up() -> None:
    def on_start(kept: ScriptedDeployment, spec: PartSpec) -> None:
        if kept.lives("decode-0")[-1:] == [6]:
            stop()
        elif spec.name == "decode-0":
            raise NoAnswer("Ray still does not answer")

    kept = ScriptedDeployment(config_of("1+1"), on_start)
    assert kept.run() == ExitCode.STOPPED
    assert kept.pauses_s == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("failure", ["", "there is no memory"])
@pytest.mark.parametrize("part", ["router", "pool-0", "prefill-0", "decode-0", "gateway-0"])
def test_a_deployment_that_has_served_waits_for_its_part_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str, failure: str
) -> None:
    monkeypatch.setattr(deployment, "announce_when_ready", lambda _, announce: announce("it serves"))

    def on_start(kept: ScriptedDeployment, spec: PartSpec) -> None:
        if spec.name == part:
            kept.die(spec, failure if spec.incarnation > 1 else "")  # the first death comes before it serves
        if kept.lives(part)[-1:] == [12]:
            stop()

    kept = ScriptedDeployment(config_of("1+1"), on_start)
    assert kept.run() == ExitCode.STOPPED
    assert kept.pauses_s[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert f"{part} does not stay up: it is started again in 30 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fault", [BlockingIOError(11, "no process"), MemoryError(), RuntimeError("can't start new thread"), KeyError("Ray")]
)
def test_a_part_that_cannot_be_started_has_died_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Exception
) -> None:
    monkeypatch.setattr(deployment, "announce_when_ready", lambda _, announce: announce("it serves"))

    def on_start(kept: ScriptedDeployment, spec: PartSpec) -> None:
        if spec.name == "decode-0" and spec.incarnation == 1:
            kept.die(spec)
        elif spec.name == "decode-0" and spec.incarnation < 8:
            raise fault
        elif spec.name == "decode-0":
            stop()

    kept = ScriptedDeployment(config_of("1+1"), on_start)
    assert kept.run() == ExitCode.STOPPED
    assert kept.lives("decode-0") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert kept.pauses_s == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert f"decode-0 cannot be started: {type(fault).__name__}" in capsys.readouterr().err
    assert all(kept.lives(part) == [1] for part in ("router", "pool-0", "prefill-0", "gateway-0"))


def test_a_first_start_without_room_for_processes_ends_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def on_start(_: ScriptedDeployment, spec: PartSpec) -> None:
        if spec.name == "decode-0":
            raise BlockingIOError(11, "no process")

    assert ScriptedDeployment(config_of("1+1"), on_start).run() == ExitCode.BROKEN
    assert "decode-0 cannot be started: BlockingIOError: [Errno 11] no process" in capsys.readouterr().err


def test_parts_that_all_do_not_stay_up_stand_in_for_nobody() -> None:
    kept = ScriptedDeployment(config_of("1+2"), dying("decode-0", "decode-1", lives=99))
    assert kept.run() == ExitCode.BROKEN
    assert kept.pauses_s == [1.0], "the first of them still had the other"


def test_a_part_that_stayed_up_is_started_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "QUICK_DEATH_S", 0.0)
    kept = ScriptedDeployment(config_of("1+1"), dying("decode-0", lives=12))
    assert kept.run() == ExitCode.STOPPED
    assert kept.pauses_s == []


def test_what_cannot_run_from_the_start_is_an_error_of_its_user() -> None:
    def on_start(kept: ScriptedDeployment, spec: PartSpec) -> None:
        if spec.name == "decode-1":
            kept.die(spec, "the model is not there")

    kept = ScriptedDeployment(config_of("2xcolocated"), on_start)
    assert kept.run() == ExitCode.USER_ERROR
    assert kept.lives("decode-1") == [1]


def test_all_ranks_of_a_worker_wait_out_one_pause() -> None:
    config = config_of("1+2", engine__tensor_parallel_size=2)
    kept = ScriptedDeployment(config, dying("decode-1", lives=8))
    assert kept.run() == ExitCode.STOPPED
    assert kept.pauses_s[:5] == [1.0, 2.0, 4.0, 8.0, 16.0], "the end of the other rank is no death of its own"
    assert kept.lives("decode-1-rank-1")[:7] == kept.lives("decode-1")[:7] == [1, 2, 3, 4, 5, 6, 7]


def test_a_worker_that_is_retired_during_its_pause_ends_there() -> None:
    config = config_of("1+2")
    kept = ScriptedDeployment(config, dying("decode-1", lives=99))
    kept.on_pause(lambda: tell(str(door_of(config.server.port)), LauncherOrder(decode=1)))
    forgotten: list[str] = []

    def on_forget(part: str) -> None:
        forgotten.append(part)
        stop()

    kept.on_forget = on_forget
    assert kept.run() == ExitCode.STOPPED
    assert forgotten == ["decode-1"]
    assert kept.lives("decode-1") == [1, 2, 3]


@pytest.mark.parametrize(("runs", "lives"), [(True, [1, 2, 3, 4, 5, 6, 7]), (False, [1, 2, 3])])
def test_a_worker_that_was_added_is_started_again_if_it_ever_ran(runs: bool, lives: list[int]) -> None:
    """A request may be what ends it. One that never ran is left out."""
    config = config_of("1+2")

    def on_start(kept: ScriptedDeployment, spec: PartSpec) -> None:
        if spec.name in ("decode-1", "decode-2"):
            kept.die(spec)
        if kept.lives("decode-2")[-1:] == [7] or kept.lives("decode-1")[-1:] == [99]:
            stop()

    kept = ScriptedDeployment(config, on_start)

    def on_pause() -> None:
        kept.on_pause(None)
        tell(str(door_of(config.server.port)), LauncherOrder(decode=3))

    kept.on_pause(on_pause)
    kept.on_forget = lambda _: stop()
    kept.runs = lambda spec: runs or spec.name != "decode-2"
    assert kept.run() == ExitCode.STOPPED
    assert kept.lives("decode-2") == lives


def test_a_second_signal_ends_every_wait() -> None:
    class Stubborn(ScriptedDeployment):
        """Parts that do not stop when asked, and a user who then interrupts once more."""

        def ask_to_stop(self, parts: Collection[str]) -> None:
            asked.append(sorted(parts))
            stop()

        def end(self, part: str) -> None:
            killed.append(part)

    asked: list[list[str]] = []
    killed: list[str] = []
    config = config_of("1+1", server__drain_s=3600)
    assert Stubborn(config, lambda _, spec: stop() if spec.name == "jobs-0" else None).run() == ExitCode.STOPPED
    assert asked == [["gateway-0", "jobs-0"]], "the others are not asked any more"
    assert sorted(killed) == ["decode-0", "gateway-0", "jobs-0", "pool-0", "prefill-0", "router"]


# --- Parts that end while it drains


class Draining(ScriptedDeployment):
    """A deployment whose gateway has open requests when it is told to stop, until the decode worker has had so many
    lives: each that begins meanwhile dies."""

    def __init__(self, config: Config, on_drain: Callable[[Draining], None], lives: int) -> None:
        super().__init__(config, lambda _, spec: self._has_started(spec))
        self._on_drain, self._most_lives, self.stopped = on_drain, lives, list[str]()

    def _has_started(self, spec: PartSpec) -> None:
        if spec.name == "decode-0" and spec.incarnation == self._most_lives:
            self.end("gateway-0")
        elif spec.name == "decode-0" and spec.incarnation > 1:
            self.die(spec)

    def ask_to_stop(self, parts: Collection[str]) -> None:
        self.stopped += sorted(parts)
        if "gateway-0" in parts:
            self._on_drain(self)
        super().ask_to_stop(set(parts) - {"gateway-0"})

    def wound(self, part: str) -> None:
        self.die(self.spec(part))


@pytest.fixture
def told_to_stop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.getfixturevalue("own_door")  # which has nobody announced

    def announce_and_stop(_: Config, announce: Callable[[str], None]) -> None:
        announce("it serves")
        stop()

    monkeypatch.setattr(deployment, "announce_when_ready", announce_and_stop)


@pytest.mark.usefixtures("told_to_stop")
@pytest.mark.parametrize(("lives", "pauses_s"), [(2, []), (6, [1.0, 2.0, 4.0])])
def test_a_part_that_open_requests_need_is_started_again_while_it_drains(lives: int, pauses_s: list[float]) -> None:
    kept = Draining(config_of("1+1", server__drain_s=5), lambda kept: kept.wound("decode-0"), lives)
    assert kept.run() == ExitCode.STOPPED
    assert kept.lives("decode-0") == list(range(1, lives + 1))
    assert kept.pauses_s == pauses_s
    assert kept.stopped == ["gateway-0", "jobs-0", "decode-0", "pool-0", "prefill-0", "router"], "each was asked once"


@pytest.mark.usefixtures("told_to_stop")
def test_who_takes_requests_is_not_started_again_while_it_drains() -> None:
    kept = Draining(config_of("1+1", server__drain_s=5), lambda kept: kept.wound("gateway-0"), 99)
    assert kept.run() == ExitCode.STOPPED
    assert all(kept.lives(part) == [1] for part in ("router", "pool-0", "prefill-0", "decode-0", "gateway-0", "jobs-0"))


@pytest.mark.usefixtures("told_to_stop")
def test_where_nothing_can_be_started_any_more_the_drain_ends_with_the_parts_that_are_left() -> None:
    def without_ray(_: PartSpec) -> None:
        raise AlignedServeError("Ray has died, and every part with it")

    def on_drain(kept: Draining) -> None:
        kept.start = without_ray  # pyrefly: ignore[bad-assignment, method-assign]
        kept.wound("decode-0")
        kept.wound("gateway-0")

    kept = Draining(config_of("1+1", server__drain_s=5), on_drain, 99)
    assert kept.run() == ExitCode.STOPPED
    assert kept.stopped[-3:] == ["pool-0", "prefill-0", "router"]


# --- New settings


def reloads(kept: ScriptedDeployment, **others: object) -> list[str]:
    """Return the answer to `alignedserve reload` where these settings are asked for now."""
    kept.asked, ours, theirs = config_of("1+1", **others), *socket.socketpair()
    kept.order(HeardOrder(LauncherOrder(reload=True), ours))
    with theirs, theirs.makefile() as lines:
        return lines.read().splitlines()


class Reloaded(ScriptedDeployment):
    """A deployment that is asked for other settings when all have started, and then stops."""

    def __init__(self, **others: object) -> None:
        super().__init__(config_of("1+1"), self._when_started)
        self.others, self.lines = others, list[str]()

    def _when_started(self, _: ScriptedDeployment, spec: PartSpec) -> None:
        if spec.name == "jobs-0" and spec.incarnation == 1:
            threading.Thread(target=self._ask).start()

    def _ask(self) -> None:
        self.lines = reloads(self, **self.others)
        if self.told:
            self.die(self.told[0])
        stop()


def test_settings_that_may_change_go_to_every_part_and_to_its_next_life() -> None:
    kept = Reloaded(server__drain_s=7.0, slo__ttft_ms=250.0, log__level="warning")
    assert kept.run() == ExitCode.STOPPED
    assert kept.lines == ["server.drain_s: 7.0", "slo.ttft_ms: 250.0", "log.level: warning"]
    assert {spec.name for spec in kept.told} == {spec.name for spec in kept.started}
    for spec in kept.told + kept.started[-1:]:
        told = parse(spec.config)
        assert (told.server.drain_s, told.slo.ttft_ms, told.log.level) == (7.0, 250.0, LogLevel.WARNING)


def test_a_part_that_cannot_be_given_new_settings_is_named_and_the_others_get_them() -> None:
    class Full(Reloaded):
        def hand_on(self, spec: PartSpec) -> None:
            if spec.name == "pool-0":
                raise RuntimeError("can't start new thread")
            super().hand_on(spec)

    kept = Full(server__drain_s=7.0)
    assert kept.run() == ExitCode.STOPPED
    named = "error: pool-0 keeps the old settings until it starts again: can't start new thread"
    assert kept.lines == ["server.drain_s: 7.0", named]
    assert {spec.name for spec in kept.told} == {spec.name for spec in kept.started} - {"pool-0"}


def test_where_one_setting_needs_a_restart_all_such_are_named_and_none_is_taken() -> None:
    kept = Reloaded(server__drain_s=7.0, server__gateways=2, engine__max_batch=3)
    assert kept.run() == ExitCode.STOPPED
    assert kept.lines == [
        "error: nothing has changed, since this needs a restart: server.gateways, engine.max_batch",
    ]
    assert kept.told == []


def test_tls_cannot_be_turned_on_and_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for wrong, said in (
        ({"server__tls_cert": str(tmp_path / "a.pem")}, "this needs a restart: server.tls_cert"),
        ({"server__keys_file": str(tmp_path / "none.yaml")}, "none.yaml"),
        ({"server__host": "0.0.0.0"}, "this needs a restart: server.host"),
    ):
        kept = Reloaded(**wrong)
        assert kept.run() == ExitCode.STOPPED
        (line,) = kept.lines
        assert line.startswith("error: ")
        assert said in line
        assert kept.told == []


def test_a_key_is_never_shown_and_a_hangup_reloads_where_no_terminal_hangs_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deployment, "hears_hangup", lambda: True)
    kept = ScriptedDeployment(config_of("1+1"), lambda _, spec: hang_up() if spec.name == "jobs-0" else None)

    def hang_up() -> None:
        kept.asked = config_of("1+1", server__api_key="word")
        signal.raise_signal(signal.SIGHUP)
        stop()

    assert kept.run() == ExitCode.STOPPED
    said = capsys.readouterr().err
    assert "reload: server.api_key: new" in said
    assert "word" not in said + str(kept.told)


# --- Parts that start and stand still


def quiet(topology: str, quiet_s: float = 0.2) -> Config:
    return config_of(topology, launch__quiet_s=quiet_s, jobs__store="off")


def test_a_start_that_stands_still_is_ended_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def on_start(kept: ScriptedDeployment, spec: PartSpec) -> None:
        if spec.name == "decode-0":
            kept.sign(Sign(spec.name, 1, Stage.WEIGHTS, 3_100_000_000, 16_100_000_000))

    kept = ScriptedDeployment(quiet("1+1"), on_start)
    kept.runs = lambda spec: spec.name != "decode-0"
    assert kept.run() == ExitCode.BROKEN
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.fullmatch(
        r"alignedserve: decode-0 reads weights \(3\.1 of 16\.1 GB\), and nothing has moved there for \d+ s: .*quiet_s",
        lines[0],
    )


def test_a_start_in_which_all_parts_run_and_no_request_is_taken_fails(capsys: pytest.CaptureFixture[str]) -> None:
    kept = ScriptedDeployment(quiet("1+1"), lambda *_: None)
    assert kept.run() == ExitCode.BROKEN
    assert "no request is taken though no part is starting" in capsys.readouterr().err


def test_a_part_that_stands_still_while_others_serve_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deployment, "announce_when_ready", lambda _, announce: announce("it serves"))

    def on_start(kept: ScriptedDeployment, _: PartSpec) -> None:
        if kept.lives("decode-1") == [1, 2, 3]:
            stop()

    kept = ScriptedDeployment(quiet("2xcolocated"), on_start)
    kept.runs = lambda spec: spec.name != "decode-1"
    assert kept.run() == ExitCode.STOPPED
    assert "decode-1 loads libraries, and nothing has moved there for" in capsys.readouterr().err
    assert kept.lives("decode-0") == [1]


def test_a_part_that_runs_and_gives_no_sign_of_life_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deployment, "announce_when_ready", lambda _, announce: announce("it serves"))
    monkeypatch.setattr(deployment, "LOOK_AGAIN_S", 0.01)

    def on_start(_: ScriptedDeployment, spec: PartSpec) -> None:
        if (spec.name, spec.incarnation) == ("router", 2):
            stop()

    def speak() -> None:
        while not is_over.wait(0.02):
            for spec in kept.started[1:]:
                kept.sign(Sign(spec.name, spec.incarnation, Stage.RUNS, 1))

    kept, is_over = ScriptedDeployment(config_of("1+1", launch__still_s=3.0), on_start), threading.Event()
    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        assert kept.run() == ExitCode.STOPPED
    finally:
        is_over.set()
        speaker.join()
    assert "router runs and has given no sign of life for" in capsys.readouterr().err
    assert [kept.lives(part) for part in ("router", "decode-0", "gateway-0")] == [[1, 2], [1], [1]]


def test_a_part_that_ends_while_it_loads_has_died_quickly_however_long_that_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a worker that fails after a minute of loading would be started for ever."""
    monkeypatch.setattr(keeper, "QUICK_DEATH_S", 0.0)  # whatever it is, the part does not get there
    kept = ScriptedDeployment(config_of("1+1"), dying("decode-0", lives=9))
    kept.runs = lambda spec: spec.name != "decode-0"
    assert kept.run() == ExitCode.BROKEN
    assert kept.lives("decode-0") == [1, 2, 3]
