"""The code of the last released version itself, where git has its tag: what it reads, and how it serves beside ours."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from alignedserve.store.sqlite_store import SqliteStore
from tests.end_to_end import deployment as deployments
from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, mixed, tokens_of
from tests.end_to_end.deployment import deployed, part_of
from tests.rare import rare
from tests.released import wire
from tests.released.test_wire import LAST, TO_DO, holds, understood

ROOT = Path(__file__).resolve().parents[2]
URL = "/v1/completions"
# A launcher without fork servers, which starts some parts with the code of another folder.
MIXED = """
from alignedserve.launch import processes
from alignedserve.safe_path import module_command

def command(module, part):
    words = module_command(module, part)
    if part.startswith({parts!r}):
        words[1] = {safe_path!r}
    return words

processes.adopt_orphans, processes.module_command = lambda: False, command
from alignedserve.__main__ import main
raise SystemExit(main())
"""

# A job runner that has the store open while the next version opens it.
WRITES_ON = """
import asyncio, sys
from pathlib import Path
from alignedserve.store.job import Endpoint, Job, LineResult
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.store import Holder

async def write():
    store, runner = await SqliteStore.open(Path(sys.argv[1])), Holder("runner", 1)
    print("open", flush=True)
    sys.stdin.readline()
    fence, job = await store.lease(runner, 60), Job("batch_1", "ann", "file-1", Endpoint.CHAT, "24h", 1, 2)
    await store.begin_file("file-1", runner, 1.0)
    await store.add_job(job)
    await store.add_results(job.id, [LineResult(1, True, "{}")], fence)
    await store.save_job(job, fence)
    await store.close()

asyncio.run(write())
"""


@pytest.fixture(scope="session")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the code of the last released version."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True)
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    archive = git(["git", "archive", f"v{found[1]}"])
    if archive.returncode:
        pytest.skip(f"git has no tag v{found[1]} here")
    folder = tmp_path_factory.mktemp("released")
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    for library in (ROOT / "kernels").glob("*.so"):  # it takes another where its sources are others
        shutil.copy(library, folder / "kernels")
    return folder


def body(number: int) -> dict[str, Any]:
    return {"model": "demo", "prompt": [number + 5] * 40, "max_tokens": 120, "ignore_eos": True}


def by(code: Path) -> dict[str, Any]:
    """Return the options of a deployment that runs this code."""
    return {"by_command": True, "typed_in": code, "environment": {"PYTHONPATH": str(code)}}


def asked(code: Path, *words: str, given: str = "") -> Any:
    """Return what wire.py says where it runs that code."""
    command = [sys.executable, wire.__file__, *words]
    env = os.environ | {"PYTHONPATH": str(code)}
    return json.loads(subprocess.run(command, env=env, input=given, capture_output=True, text=True, check=True).stdout)


@rare
def test_what_is_kept_of_it_is_what_it_writes(last: Path) -> None:
    assert asked(last) == asdict(LAST)


@rare
@understood
def test_it_reads_what_is_written_today(last: Path) -> None:
    now = wire.Wire.of_this_code()
    kinds = [kind for kind in LAST.frames if kind in now.frames]
    read = asked(last, "read", given="\n".join(now.frames[kind] for kind in kinds))
    wrong = [kind for kind, said in zip(kinds, read, strict=True) if not holds(now.fields[kind], said)]
    assert wrong == [], TO_DO


@rare
def test_it_writes_on_to_a_store_that_todays_code_has_opened(last: Path, tmp_path: Path) -> None:
    path, env = tmp_path / "jobs.sqlite", os.environ | {"PYTHONPATH": str(last)}
    command = [sys.executable, "-c", WRITES_ON, str(path)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=last) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"

        async def check() -> None:
            store = await SqliteStore.open(path)
            await asyncio.to_thread(writer.communicate, b"\n")
            assert [job.id for job in await store.open_jobs()] == ["batch_1"]
            assert await store.done_lines("batch_1") == {1}
            await store.close()

        asyncio.run(check())
    assert writer.returncode == 0


@rare
@understood
@pytest.mark.parametrize("parts", [("prefill-", "decode-"), ("router", "gateway-", "pool", "jobs")], ids=str)
def test_parts_of_today_join_its_deployment(
    last: Path, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    safe_path = str(ROOT / "alignedserve" / "safe_path.py")
    code = MIXED.format(parts=parts, safe_path=safe_path)
    monkeypatch.setattr(deployments, "spawn", partial(deployments.spawn, program=(sys.executable, "-c", code)))
    wanted = mixed(6, 4)
    with deployed(topology="1+1", by_command=True, typed_in=last, environment={"PYTHONPATH": str(last)}) as deployment:
        started = {part_of(command): command for command in deployment.processes().values()}
        of_today = {part for part, command in started.items() if part and f" {safe_path} " in command}
        assert of_today == {part for part in started if part and part.startswith(parts)}
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        assert "has version" not in deployment.whole_log()


@rare
def test_todays_deployment_takes_over(last: Path, tmp_path: Path) -> None:
    """The recipe of docs/guides/upgrade.md: both run on one store of jobs, and then the older one ends."""
    jobs = ("--jobs-directory", str(tmp_path / "jobs"))
    lines = [{"custom_id": str(at), "method": "POST", "url": URL, "body": body(at)} for at in range(60)]
    stream = Wanted((5, 6, 7), 200, stream=True, ignore_eos=True)

    async def upgrade() -> None:
        async with client(before.url) as http, client(after.url) as served_on:
            written = "\n".join(map(json.dumps, lines)).encode()
            file = await http.post("/v1/files", files={"file": ("x.jsonl", written)}, data={"purpose": "batch"})
            wanted = {"input_file_id": file.json()["id"], "endpoint": URL, "completion_window": "24h"}
            path = f"/v1/batches/{(await http.post('/v1/batches', json=wanted)).json()['id']}"
            streaming = asyncio.create_task(tokens_of(http, stream))
            while not (begun := (await http.get(path)).json())["request_counts"]["completed"]:
                await asyncio.sleep(0.05)
            assert begun["status"] == "in_progress"
            before.send(signal.SIGTERM)
            check_greedy([stream], [await streaming])
            assert await asyncio.to_thread(before.ended) == 0
            while (batch := (await served_on.get(path)).json())["status"] != "completed":
                assert batch["status"] in ("in_progress", "finalizing")
                await asyncio.sleep(0.2)
            output = (await served_on.get(f"/v1/files/{batch['output_file_id']}/content")).text
            assert sorted(json.loads(row)["custom_id"] for row in output.splitlines()) == sorted(map(str, range(60)))

    with deployed(*jobs, "--drain-s", "600", **by(last)) as before, deployed(*jobs) as after:
        asyncio.run(upgrade())
        assert after.metric("generation_tokens_total") > 0, "the older deployment has done all of the batch"
