"""How a long start is shown."""

from __future__ import annotations

import io
import json
import queue
import shutil
from pathlib import Path

import pytest

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.config.choices import ModelNames
from alignedserve.config.config import Config
from alignedserve.config.sections import ServerConfig, SloConfig
from alignedserve.launch import screen
from alignedserve.launch.screen import StartScreen
from alignedserve.signs import Sign, Stage

HALF = Sign("decode-0", 1, Stage.WEIGHTS, 8_000_000_000, 16_000_000_000)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_that_is_gone_when_it_serves() -> None:
    terminal = Terminal()
    shown = StartScreen(terminal, is_for_people=True)
    shown.show(HALF)
    drawn = terminal.getvalue()
    assert "alignedserve: decode-0 reads weights [##########..........] 8.0 of 16.0 GB" in drawn
    assert drawn.endswith("\r"), "a line of the log must not begin behind the bar"
    assert "\n" not in drawn
    shown.show(None)
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_stage_without_pieces_has_no_bar() -> None:
    terminal = Terminal()
    StartScreen(terminal, is_for_people=True).show(Sign("gateway-0", 1, Stage.LIBRARIES))
    assert terminal.getvalue().strip().endswith("gateway-0 loads libraries")


@pytest.mark.parametrize("file", [io.StringIO(), Terminal()], ids=["a file", "a terminal with lines for machines"])
def test_elsewhere_a_long_start_writes_a_line_of_the_log_now_and_then(
    file: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(screen.log, "info", lambda line, *values: lines.append(line % values))
    now = [0.0]
    shown = StartScreen(file, is_for_people=not file.isatty(), clock=lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        shown.show(Sign("decode-0", 1, Stage.WEIGHTS, min(second, 20) * 10**9, 30 * 10**9))
    assert lines == [
        "starting: decode-0 reads weights: 10.0 of 30.0 GB",
        "starting: decode-0 reads weights: 20.0 of 30.0 GB",
    ], "a quick start says nothing, and what stands still is not said again"
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("slo", "line"),
    [
        (
            SloConfig(),
            "promise: first token in 6 s, then one each 250 ms (what this machine keeps; --slo-ttft-ms asks for less)\n"
            "line: chats beyond that wait in order, up to 60 s (--patience-s)",
        ),
        (SloConfig(ttft_ms=6000.0), "promise: first token in 6 s, then one each 250 ms"),
    ],
)
def test_the_greeting_says_what_the_gateway_has_been_told(
    slo: SloConfig, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    promise = {"ttft_ms": 6000.0, "tbt_ms": 250.0}
    looks = iter([None, {}, {"promise": None}])  # a worker tells a little later
    monkeypatch.setattr(screen, "_ready", lambda _: next(looks, {"promise": promise}))
    said = queue.Queue[str]()
    screen.announce_when_ready(Config(model="demo", slo=slo), said.put)
    assert f"\n{line}\ndemo: " in said.get(timeout=30)


@pytest.mark.parametrize(("port", "command"), [(8000, "alignedserve stop"), (9170, "alignedserve stop --port 9170")])
def test_the_command_that_stops_it_names_another_port(port: int, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "is_ready", lambda _: True)
    said = queue.Queue[str]()
    screen.announce_when_ready(Config(model="demo", server=ServerConfig(port=port)), said.put)
    assert said.get(timeout=30).splitlines()[-1] == f"stop: Ctrl-C, or {command}"


def test_a_model_without_chat_template_is_tried_by_a_completion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in DEMO_FOLDER.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(screen, "_ready", lambda _: {})
    said = queue.Queue[str]()
    screen.announce_when_ready(Config(model=str(tmp_path), served_model_name=ModelNames(("base",))), said.put)
    greeting = said.get(timeout=30)
    assert "/v1/completions -H" in greeting
    assert '"prompt": "' in greeting
    assert "chat" not in greeting.replace("line: chats", "")
