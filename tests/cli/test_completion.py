"""What shells complete, in the shells themselves, by the scripts that the command prints, which ask the command."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alignedserve.cli import main as cli

BASH = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_alignedserve
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{}}
source {script}
compadd() {{ shift; print -l -- "$@" }}
_files() {{}}
words=({words}); CURRENT=$#words
_alignedserve
"""
FISH = "source {script}; complete -C {line}"
CASES = [
    (("",), {"serve", "chat", "batch", "completion"}, {"--help", "submit"}),
    (("batch", ""), {"submit", "download"}, {"serve"}),
    (("batch", "download", "--"), {"--out", "--port", "--ca"}, {"--wait", "--window"}),
    (("serve", "smollm2", "--"), {"--max-model-len", "--kv-memory-mb"}, {"--window"}),
    (("serve", "smollm2", "--kv-dtype", ""), {"auto", "int8"}, {"--port"}),
    (("--",), {"--help", "--version"}, {"--port"}),
    (("status", "--"), {"--port", "--wait"}, {"--window"}),
    (("completion", ""), {"bash", "fish", "zsh"}, {"serve"}),
]


@pytest.mark.parametrize(("words", "right", "wrong"), CASES)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_what_may_follow(
    shell: str,
    words: tuple[str, ...],
    right: set[str],
    wrong: set[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not here")
    assert cli.main(["completion", shell]) == 0
    script, command = tmp_path / "script", tmp_path / "alignedserve"
    script.write_text(capsys.readouterr().out)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m alignedserve "$@"\n')
    command.chmod(0o755)
    written = (str(command), *words)
    code = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell].format(
        script=script, words=shlex.join(written), line=shlex.quote(" ".join(written))
    )
    bare = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    said = subprocess.run([program, *bare, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    offered = {line.partition("\t")[0] for line in said.splitlines()}
    assert offered >= {word for word in right if word.startswith(words[-1])}
    assert not offered & wrong
