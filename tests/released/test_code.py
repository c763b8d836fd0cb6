"""The code of the last released version itself, where git has its tag: what it reads, and how it serves beside ours."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from alignedserve.store.sqlite_store import SqliteStore
from tests.end_to_end import deployment as deployments
from tests.end_to_end.client import all_tokens, check_greedy, mixed
from tests.end_to_end.deployment import deployed, part_of
from tests.rare import rare
from tests.released import wire
from tests.released.test_wire import LAST, TO_DO, holds, understood

ROOT = Path(__file__).resolve().parents[2]
# A launcher without fork servers, which starts some parts with the code of another folder.
MIXED = """
from alignedserve.launch import local
from alignedserve.safe_path import module_command

def command(module, part):
    words = module_command(module, part)
    if part.startswith({parts!r}):
        words[1] = {safe_path!r}
    return words

local.adopt_orphans, local.module_command = lambda: False, command
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
    tag = git(["git", "describe", "--tags", "--abbrev=0", "--match", "v*"])
    if tag.returncode:
        pytest.skip("git has no tag of a release here")
    folder = tmp_path_factory.mktemp("released")
    archive = git(["git", "archive", tag.stdout.decode().strip()], check=True).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    for library in (ROOT / "kernels").glob("*.so"):  # it takes another where its sources are others
        shutil.copy(library, folder / "kernels")
    return folder


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
