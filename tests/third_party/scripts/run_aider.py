"""aider, a command that edits files as a model says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tries import Report

url, model, _ = sys.argv[1:]
report = Report("aider-chat")
FILE = Path("sums.py")
QUIETLY = (
    "--no-git --yes-always --no-show-model-warnings --no-check-update --analytics-disable --no-pretty --map-tokens 0"
)


@report.tries("an edit of a file")
def edit() -> dict[str, object]:
    FILE.write_text("def add(a, b):\n    return a - b\n", encoding="utf-8")
    limit = f"- name: openai/{model}\n  extra_params: {{max_tokens: 256}}\n"  # so small a model may not end
    Path(".aider.model.settings.yml").write_text(limit, encoding="utf-8")
    command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{model}", "--edit-format", "whole"]
    asked = "--message", "add must return a + b.", str(FILE)
    env = {**os.environ, "OPENAI_API_BASE": url, "OPENAI_API_KEY": "none"}
    done = subprocess.run([*command, *QUIETLY.split(), *asked], env=env, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    return {"exit_code": done.returncode, "file": FILE.read_text(encoding="utf-8"), "answer": "Tokens:" in done.stdout}


report.say()
