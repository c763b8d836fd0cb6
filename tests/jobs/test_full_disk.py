"""Tests of files and batches on a full disk: uploads are refused, jobs wait, and nothing is lost or done twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.config.config import Config
from alignedserve.config.sections import JobsConfig
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import FakeOwner
from tests.jobs.conftest import Service, ended, line, rows, submit, until, upload
from tests.small_disk import SmallDisk, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def service(disk: SmallDisk, text: TextModel, hello: tuple[int, ...]) -> Service:
    return Service(text, FakeOwner(hello), Config(jobs=JobsConfig(directory=str(disk.folder / "data"))))


def test_an_upload_that_finds_no_room_is_refused_and_leaves_nothing(service: Service, disk: SmallDisk) -> None:
    async def check() -> None:
        async with service.client() as client:
            kept = (await upload(client, line("a"))).json()
            storage = await service.storage()
            # the first file fills the disk while it is written; the second never fits
            for size in (3_000_000, 5_000_000):
                disk.fill(but=1_000_000)
                refused = await upload(client, b"x" * size)
                assert (refused.status_code, refused.json()["error"]["code"]) == (507, "insufficient_storage")
                assert refused.json()["error"]["message"] == "the store has no space left", "no path of the server"
                disk.make_room()
                assert list(await asyncio.to_thread(storage.blobs.sizes)) == [kept["id"]]
            assert [listed["id"] for listed in (await client.get("/v1/files")).json()["data"]] == [kept["id"]]
            assert (await client.get(f"/v1/files/{kept['id']}/content")).content == line("a")
            assert (await upload(client, b"x" * 1_000_000)).status_code == 200

    service.run(check)


def test_a_job_waits_for_room_and_has_every_line_once(
    service: Service, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("alignedserve.jobs.actor.RETRY_S", 0.05)
    ids = [f"line-{number}" for number in range(60)]

    async def check() -> None:
        async with service.client() as client:
            batch = await submit(client, b"\n".join(map(line, ids)))
            async with service.running():
                await until(client, batch["id"], lambda state: state["request_counts"]["completed"] > 0)
                disk.fill()
                while "no space is left" not in caplog.text:
                    await asyncio.sleep(0.02)
                disk.make_room()
                batch = await ended(client, batch["id"])
            assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
            assert sorted(row["custom_id"] for row in await rows(client, batch["output_file_id"])) == sorted(ids)

    service.run(check)
