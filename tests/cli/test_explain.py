"""Tests of `alignedserve explain` against a server that tells the story of a request in three forms."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from alignedserve import http_client
from alignedserve.cli.remote import explain
from alignedserve.cli.remote.options import ExplainOptions
from alignedserve.errors import AlignedServeError


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    asked = list[bytes]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path)
        return httpx.Response(200, text=f"told as {request.url.params['format']}\n")

    monkeypatch.setattr(http_client, "options", lambda *_, **__: {"transport": httpx.MockTransport(answer)})
    return asked


@pytest.mark.parametrize("form", ["text", "json"])
def test_it_prints_what_the_server_tells(paths: list[bytes], capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert explain.run(ExplainOptions("chat/1", json=form == "json")) == 0
    assert capsys.readouterr().out == f"told as {form}\n"
    assert paths == [f"/v1/requests/chat%2F1/timeline?format={form}".encode()]


@pytest.mark.usefixtures("paths")
def test_it_writes_a_timeline_for_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "timeline.json"
    assert explain.run(ExplainOptions("r", perfetto=path)) == 0
    assert path.read_text(encoding="utf-8") == "told as perfetto\n"
    assert capsys.readouterr().out.startswith(f"{path}: open it at")


@pytest.mark.usefixtures("paths")
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(AlignedServeError, match="cannot be written"):
        explain.run(ExplainOptions("r", perfetto=tmp_path))
