"""The examples as a user runs them: those of a client on one server, the others alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.deployment import ANSWER_S, Deployment
from tests.rare import rare

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALLER = {
    "first_s=5": "first_s=1",
    "seeds=[0, 1]": "seeds=[0]",
    'topology="2+2"': 'topology="1+1", settings={"engine.tune_s": 0}',
}


def printed_by(name: str, folder: Path, **env: str) -> str:
    """Return what an example prints. Its workers do not measure steps first; its loads are short, its cluster small."""
    assert all(any(text in path.read_text() for path in EXAMPLES.glob("*.py")) for text in SMALLER), "it was reworded"
    code = (EXAMPLES / name).read_text()
    for written, smaller in SMALLER.items():
        code = code.replace(written, smaller)
    (example := folder / name).write_text(code)
    command = [sys.executable, str(example)]
    env |= {"ALIGNEDSERVE_ENGINE_PROFILE_S": "0", "ALIGNEDSERVE_ENGINE_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=ANSWER_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_chat(deployment: Deployment, tmp_path: Path) -> None:
    assert len(printed_by("chat.py", tmp_path, URL=deployment.url).splitlines()) >= 2


@rare
def test_llm(deployment: Deployment, tmp_path: Path) -> None:
    assert printed_by("llm.py", tmp_path, URL=deployment.url).startswith("What is the capital of France? ")


@rare  # test_batches.py runs one by commands
def test_a_batch(deployment: Deployment, tmp_path: Path) -> None:
    printed = printed_by("batch.py", tmp_path, URL=deployment.url)
    assert [f"sum-{number} " in printed for number in range(8)] == [True] * 8


@rare
def test_deadlines(deployment: Deployment, tmp_path: Path) -> None:
    chat, document = printed_by("deadlines.py", tmp_path, URL=deployment.url).splitlines()
    assert (chat.split(":")[0], document.split(":")[0]) == ("chat", "document")


@rare  # tests/schedulers
def test_a_scheduler(tmp_path: Path) -> None:
    assert "few documents" in printed_by("scheduler.py", tmp_path)


@rare  # tests/api/test_simulating.py
def test_simulate_and_compare(tmp_path: Path) -> None:
    printed = printed_by("compare.py", tmp_path)
    assert "of the chats in time" in printed
    assert "highest rate at 90%" in printed
    assert (tmp_path / "run.html").stat().st_size > 10_000


@rare  # test_python_api.py starts such a deployment from a script
def test_a_cluster_as_processes_of_this_machine(tmp_path: Path) -> None:
    """On Ray the same call is tried by test_on_ray.py. Requests are taken once one worker that decodes is there."""
    printed = printed_by("cluster.py", tmp_path, LAUNCHER="local", MODEL="demo").splitlines()
    roles = {line.partition("-")[0] for line in printed if line.endswith(" on local")}
    assert "pool" in roles
    assert roles & {"prefill", "decode"}
