"""The commands that the README and the docs name are understood: their words, settings and workloads."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from alignedserve.cli import main as cli
from alignedserve.cli.serving import config_of
from alignedserve.errors import AlignedServeError
from alignedserve.lab.loads.workload.spec import read_workload
from tests.house import ROOT
from tests.house.test_pages import PAGES

IN_CODE = re.compile(r"^(?: {4,})?(?:\$ )?(?:echo .* \| )?(?:\S*/)?alignedserve ([a-z]+ .*)$", re.MULTILINE)
IN_PROSE = re.compile(r"`(?:\S*/)?alignedserve\s([a-z][^`]* --?[^`]*)`")  # those with flags: others are names
OF_THE_READER = re.compile(r"\b(?!examples/)[\w/]+\.(?:csv|jsonl|yaml|py)\b|\bPATH\b")  # files that are not here
A_TITLE = re.compile(r"\.\.\.|--help|--\w+$")  # of a section on a command


def commands() -> Iterator[tuple[str, str]]:
    """Yield each page, and a command of it without comments and what is optional."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for words in (*IN_CODE.findall(text), *IN_PROSE.findall(text)):
            yield page.name, re.split(r" {2,}|#", re.sub(r"\[[^\]]*\]", "", " ".join(words.splitlines())))[0].strip()


def wrong(command: str) -> str:
    """Return why a command is not understood; what it would do is not done."""
    try:
        args = cli._parse(shlex.split(command))
        if not OF_THE_READER.search(command):
            if command.startswith("serve "):
                config_of(args)
            if isinstance(workload := getattr(args, "workload", None), str):
                read_workload(workload)
    except AlignedServeError as error:
        return str(error)
    return ""


def test_the_commands_of_the_docs_are_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Save the page's scheduler where Python finds it, as the page says."""
    _, code, _ = (ROOT / "docs" / "how" / "scheduler.md").read_text(encoding="utf-8").split("```", 2)
    (tmp_path / "longest.py").write_text(code.removeprefix("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli, "parser_of", cache(cli.parser_of))
    found = {command: page for page, command in commands() if not A_TITLE.search(command)}
    assert len(found) > 60
    assert [(page, command, why) for command, page in found.items() if (why := wrong(command))] == []


@pytest.mark.parametrize(
    "command", ["serv demo", "bench --wrokload chat", "serve demo --set engine.no=1", "simulate --workload chat,no=1"]
)
def test_a_command_that_is_wrong_is_seen(command: str) -> None:
    assert wrong(command)
