"""Tests of files as clients see them: uploads, lists, limits, and expiry."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from alignedserve.config.config import Config
from alignedserve.errors import StoreError, StoreFull
from alignedserve.gateway.files import file_object
from alignedserve.gateway.http.limits import BytePace
from alignedserve.store.job import Job
from alignedserve.store.storage import LazyStorage, open_storage
from alignedserve.store.store import Holder, Listing, ListPage, Purpose, StoredFile
from alignedserve.text.text_model import TextModel
from tests.conftest import SOAK
from tests.gateway.conftest import Connection, FakeOwner
from tests.jobs.conftest import URL, Service, line, sqlite_only, submit, upload


@sqlite_only
def test_lists_have_pages_and_quotas_hold(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.gateway.files.MOST_FILES", 5)
    monkeypatch.setattr("alignedserve.gateway.batches.MOST_UNFINISHED", 3)
    service = Service(text, FakeOwner(hello), replace(config, jobs=replace(config.jobs, quota_mb=1)))

    async def check() -> None:
        async with service.client() as client:
            batches = [await submit(client, line(str(number)), completion_window="7d") for number in range(3)]
            first = (await client.get("/v1/batches", params={"limit": 2})).json()
            assert [listed["id"] for listed in first["data"]] == [batches[2]["id"], batches[1]["id"]]
            assert (first["has_more"], first["last_id"]) == (True, batches[1]["id"])
            rest = (await client.get("/v1/batches", params={"after": first["last_id"]})).json()
            assert [listed["id"] for listed in rest["data"]] == [batches[0]["id"]]
            assert rest["has_more"] is False
            for params in ({"limit": 0}, {"limit": 101}, {"limit": "9" * 5_000}, {"order": "up"}):
                assert (await client.get("/v1/batches", params=params)).status_code == 400
            ordered = (await client.get("/v1/files", params={"order": "asc", "purpose": "batch"})).json()
            assert [listed["id"] for listed in ordered["data"]] == [batch["input_file_id"] for batch in batches]
            assert (await client.get("/v1/files", params={"purpose": "vision"})).json()["data"] == []
            file = (await upload(client, line("more"))).json()
            asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
            refused = await client.post("/v1/batches", json=asked)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
            full = await upload(client, b"x" * 1_000_000)
            assert (full.status_code, full.json()["error"]["code"]) == (413, "quota_exceeded")
            assert (await upload(client, line("more"))).status_code == 200
            assert (await upload(client, line("more"))).json()["error"]["code"] == "quota_exceeded"
            in_use = await client.delete(f"/v1/files/{batches[0]['input_file_id']}")
            assert (in_use.status_code, in_use.json()["error"]["code"]) == (409, "file_in_use")

    service.run(check)


@sqlite_only
@pytest.mark.parametrize(("kind", "most"), [("files", 3), ("batches", 20)])
def test_a_key_looks_up_so_many_rows_and_no_other_key_waits(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    """A list of 10,000 files took the event loop 59 ms, and a key could ask for it again and again. An open batch
    counts as ten rows."""
    monkeypatch.setattr(f"alignedserve.gateway.{kind}.MOST_ROWS", most)
    service = Service(text, FakeOwner(hello), config)

    async def check() -> None:
        async with service.client() as client, service.client("bob") as bob:
            for _ in range(2):
                await submit(client, line("a"))
            answers = await asyncio.gather(*(client.get(f"/v1/{kind}") for _ in range(5)))
            read = 2 if kind == "files" else 1
            assert [answer.status_code for answer in answers] == [200] * read + [429] * (5 - read)
            assert answers[-1].headers["retry-after"].isdigit()
            assert f"{most} rows of {kind} in a minute" in answers[-1].json()["error"]["message"]
            assert (await bob.get(f"/v1/{kind}")).status_code == 200

    service.run(check)


def test_rows_that_a_list_leaves_out_count_where_they_are_read(service: Service) -> None:
    """Redis knows no purpose: the gateway reads all files to find none."""

    async def check() -> None:
        async with service.client() as client:
            await upload(client, line("a"))
            listing = await (await service.storage()).store.files("ann", ListPage(), Purpose.BATCH_OUTPUT)
            assert listing == Listing((), False, 1 if service.config.jobs.store.startswith("unix") else 0)

    service.run(check)


@sqlite_only
def test_a_list_is_written_as_it_is_sent(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made and encoded in one go, in which nobody else's stream went on."""
    written = list[str]()

    def noted(file: StoredFile) -> dict[str, Any]:
        written.append(file.id)
        return file_object(file)

    monkeypatch.setattr("alignedserve.gateway.files.file_object", noted)

    async def check() -> None:
        store, name = (await service.storage()).store, 300 * "é"
        for number in range(500):
            await store.add_file(StoredFile(f"file-{number}", "ann", name, 1, Purpose.BATCH, 0))
        reader, seen = Connection("/v1/files", b""), [0]
        reader.scope |= {"method": "GET", "headers": [(b"authorization", b"Bearer ann")]}

        async def send(message: Any) -> None:
            seen.append(len(written))
            await reader.send(message)

        await service.app(reader.scope, reader.receive, send)
        assert max(after - before for before, after in pairwise(seen)) <= 128
        listed = json.loads(b"".join(message.get("body", b"") for message in reader.sent))
        assert [file["id"] for file in listed["data"]] == [f"file-{number}" for number in reversed(range(500))]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("file-499", "file-0", False)

    service.run(check)


def test_a_file_is_deleted_without_a_look_at_other_keys_batches(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with service.client() as client, service.client("bob") as bob:
            batch = await submit(client, line("a"))
            store, read = (await service.storage()).store, list[str]()
            open_jobs = store.open_jobs

            async def noted(owner: str | None = None) -> Sequence[Job]:
                found = await open_jobs(owner)
                read.extend(job.id for job in found)
                return found

            monkeypatch.setattr(store, "open_jobs", noted)
            file = (await upload(bob, line("b"))).json()["id"]
            assert (await bob.delete(f"/v1/files/{file}")).status_code == 200
            assert read == []
            assert (await client.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 409
            assert read == [batch["id"]]

    service.run(check)


def test_quotas_hold_where_several_come_at_once(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.gateway.batches.MOST_UNFINISHED", 2)
    service = Service(text, FakeOwner(hello), replace(config, jobs=replace(config.jobs, quota_mb=1)))

    async def check() -> None:
        async with service.client() as client:
            uploads = await asyncio.gather(*(upload(client, b"x" * 400_000) for _ in range(4)))
            assert sorted(upload.status_code for upload in uploads) == [200, 200, 413, 413]
            files = [upload.json()["id"] for upload in uploads if upload.status_code == 200]
            storage = await service.storage()
            assert sorted(await asyncio.to_thread(storage.blobs.sizes)) == sorted(files)
            asked = {"input_file_id": files[0], "endpoint": URL, "completion_window": "24h"}
            made = await asyncio.gather(*(client.post("/v1/batches", json=asked) for _ in range(4)))
            assert sorted(answer.status_code for answer in made) == [200, 200, 429, 429]
            assert {answer.headers.get("retry-after") for answer in made if answer.status_code == 429} == {"60"}

    service.run(check)


@sqlite_only
def test_uploads_are_checked_as_they_come_and_leave_nothing_where_they_fail(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.gateway.files.MOST_FILE_MB", 1)
    service = Service(text, FakeOwner(hello), config)

    async def endless() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for _ in range(10_000):  # the server reads only the first parts
            yield b"x" * 65_536

    async def check() -> None:
        async with service.client() as client:
            for fields, param in (({"purpose": "vision"}, "purpose"), ({"colour": "red"}, "colour")):
                assert (await upload(client, b"x", **fields)).json()["error"]["param"] == param
            assert (await upload(client, b"")).json()["error"]["code"] == "empty_file"
            expiring = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
            file = (await upload(client, b"\0\xff" * 9, **expiring)).json()
            assert file["expires_at"] == file["created_at"] + 3_600
            assert (await client.get(f"/v1/files/{file['id']}/content")).content == b"\0\xff" * 9
            wrong = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}
            assert (await upload(client, b"x", **wrong)).status_code == 400
            form = {"Content-Type": "multipart/form-data; boundary=b"}
            too_large = await client.post("/v1/files", content=endless(), headers=form)
            assert too_large.status_code == 413
            assert (await client.post("/v1/files", content=b"--b\r\n", headers=form)).status_code == 400
            long_header = b"--b\r\nX: " + b"a" * 100_000
            assert (await client.post("/v1/files", content=long_header, headers=form)).status_code == 400
            long_boundary = {"Content-Type": f"multipart/form-data; boundary={'b' * 300}"}
            assert (await client.post("/v1/files", content=b"", headers=long_boundary)).status_code == 400
            assert (await client.post("/v1/files", json={})).status_code == 400
            storage = await service.storage()
            assert list(await asyncio.to_thread(storage.blobs.sizes)) == [file["id"]]

    service.run(check)


@sqlite_only
def test_the_head_of_a_file_reads_none_of_it_and_contents_have_a_pace(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen clients that asked for heads had 2 GB read in a second."""
    moved = list[int]()

    async def take(_: BytePace, __: str, num_bytes: int) -> None:
        moved.append(num_bytes)

    async def check() -> None:
        async with service.client() as client:
            path = f"/v1/files/{(await upload(client, b'x' * 1_000_000)).json()['id']}/content"
            storage = await service.storage()
            monkeypatch.setattr(BytePace, "take", take)
            with monkeypatch.context() as patched:
                patched.setattr(storage.blobs, "open", None)
                head = await client.head(path)
            assert (head.status_code, head.headers["content-length"], head.content) == (200, "1000000", b"")
            assert (await client.head("/v1/files/file-none/content")).status_code == 404
            assert not moved
            whole = await client.get(path)
            assert {**head.headers, "x-request-id": 0} | {"request-id": 0} == {**whole.headers, "x-request-id": 0} | {
                "request-id": 0
            }
            assert (len(whole.content), sum(moved)) == (1_000_000, 1_000_000)

    service.run(check)


@sqlite_only
def test_expired_files_go(service: Service) -> None:
    async def check() -> None:
        async with service.client() as client:
            file = (await upload(client, b"x")).json()
            assert file["expires_at"] == file["created_at"] + 30 * 86_400
            storage = await service.storage()
            stored = await storage.store.file("ann", file["id"])
            assert stored is not None
            await storage.store.remove_file("ann", stored.id)
            await storage.store.add_file(replace(stored, expires_at=1))
            assert (await client.get(f"/v1/files/{file['id']}")).status_code == 404
            assert (await client.get("/v1/files")).json()["data"] == []
            async with service.running():
                while await asyncio.to_thread(storage.blobs.sizes):
                    await asyncio.sleep(0.02)
            assert await storage.store.expired_files(2) == []

    service.run(check)


def test_bytes_of_an_upload_that_was_killed_are_swept_at_the_next_start(service: Service) -> None:
    async def check() -> None:
        async with service.client() as client:
            kept = (await upload(client, line("a"))).json()
            storage = await service.storage()
            for number in range(2):  # killed before the file was whole, and before it was acknowledged
                writing = await storage.begin(f"file-lost{number}")
                writing.write(b"x" * 1_000_000)
                if number:
                    writing.commit()
            other_storage = await open_storage(service.config.jobs, Holder("another gateway", 1))
            await other_storage.begin("file-now")  # this holder is still uploading
            again = LazyStorage(service.config.jobs, Holder("gateway", 2))
            await again()
            assert set(await asyncio.to_thread(storage.blobs.sizes)) == {kept["id"], "file-now.part"}
            assert await other_storage.store.orphans(Holder("gateway", 3), 0.0) == []
            await other_storage.close()
            await (await again()).close()

    service.run(check)


REMOVES = """
import asyncio, os, signal, sys
from alignedserve.config.sections import JobsConfig
from alignedserve.store.storage import open_storage
from alignedserve.store.store import Holder

async def remove(id, store, directory):
    storage = await open_storage(JobsConfig(store=store, directory=directory), Holder("gateway", 1))
    storage.blobs.remove = lambda id: os.kill(os.getpid(), signal.SIGKILL)
    await storage.remove(await storage.store.file("ann", id))

asyncio.run(remove(*sys.argv[1:]))
"""


def test_bytes_of_a_removal_that_was_killed_in_the_middle_are_swept_and_no_others(service: Service) -> None:
    async def check() -> None:
        async with service.client() as client:
            kept, gone = [(await upload(client, line("a"))).json()["id"] for _ in range(2)]
            storage, jobs = await service.storage(), service.config.jobs
            elsewhere = await asyncio.to_thread(storage.blobs.begin, "file-of-another-store")
            await asyncio.to_thread(elsewhere.commit)
            await storage.begin("file-now")  # this holder is still uploading
            command = [sys.executable, "-c", REMOVES, gone, jobs.store, str(jobs.directory)]
            killed = await asyncio.to_thread(subprocess.run, command)
            assert killed.returncode == -signal.SIGKILL
            assert (await client.get(f"/v1/files/{gone}")).status_code == 404
            assert gone in await asyncio.to_thread(storage.blobs.sizes)
            async with service.running():
                # the file is no longer listed once its bytes are gone
                while await storage.store.orphans(Holder("gateway", 1), 1.0):
                    await asyncio.sleep(0.02)
            stays = {kept, "file-now.part", "file-of-another-store"}
            assert set(await asyncio.to_thread(storage.blobs.sizes)) == stays

    service.run(check)


ADDS_AND_REMOVES = """
import asyncio, sys
from alignedserve.config.sections import JobsConfig
from alignedserve.store.storage import open_storage
from alignedserve.store.store import Holder, Purpose, StoredFile

async def work(life, store, directory):
    storage = await open_storage(JobsConfig(store=store, directory=directory), Holder("gateway", int(life)))
    for number in range(100_000):
        id = f"file-{life}-{number}"
        writing = await storage.begin(id)
        writing.write(b"x" * 1_000)
        writing.commit()
        file = StoredFile(id, "ann", id, 1_000, Purpose.BATCH, 1)
        await storage.add(file, writing)
        if number % 8:
            await storage.remove(file)
        print(id, flush=True)

asyncio.run(work(*sys.argv[1:]))
"""


def test_after_a_kill_at_any_moment_there_are_the_bytes_of_each_file_and_no_others(service: Service) -> None:
    jobs, draw = service.config.jobs, Random(1)

    def kill_one(life: int) -> None:
        command = [sys.executable, "-c", ADDS_AND_REMOVES, str(life), jobs.store, str(jobs.directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(1, 20)):
                process.stdout.readline()
            time.sleep(draw.random() * 0.005)  # somewhere within the next upload
            process.kill()
            assert process.wait() == -signal.SIGKILL

    async def check() -> None:
        for life in range(1, 31 if SOAK else 3):
            await asyncio.to_thread(kill_one, life)
            again = await LazyStorage(jobs, Holder("gateway", life + 1))()
            files = await again.store.files("ann", ListPage(1_000))
            assert files is not None
            assert set(await asyncio.to_thread(again.blobs.sizes)) == {file.id for file in files.records}
            await again.close()

    service.run(check)


@sqlite_only
def test_where_it_is_unknown_whether_a_file_was_added_its_bytes_stay(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alignedserve.store.sqlite_store import SqliteStore

    add = SqliteStore.add_file

    async def loses_its_answer(self: SqliteStore, *given: Any) -> None:
        await add(self, *given)
        raise StoreError("the connection was lost")

    async def check() -> None:
        async with service.client() as client:
            storage = await service.storage()
            monkeypatch.setattr(SqliteStore, "add_file", loses_its_answer)
            assert (await upload(client, b"abc")).status_code == 503
            (file,) = (await client.get("/v1/files")).json()["data"]
            assert (await client.get(f"/v1/files/{file['id']}/content")).content == b"abc"
            monkeypatch.setattr(SqliteStore, "add_file", full)
            assert (await upload(client, b"abcd")).status_code == 507
            assert list(await asyncio.to_thread(storage.blobs.sizes)) == [file["id"]]

    async def full(*_: Any) -> None:
        raise StoreFull("no space is left")

    service.run(check)
