"""Tests of clients that send or read files slowly, many at once or compressed: each is disconnected, the next is served
as usual."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from alignedserve.config.config import Config
from alignedserve.gateway.http import uploading
from alignedserve.gateway.http.uploading import MOST_BESIDE_BYTES, SLICE_BYTES
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import Connection, FakeOwner
from tests.jobs.conftest import Service, line, upload

pytestmark = pytest.mark.parametrize("config", ["sqlite"], indirect=True)
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
BEGUN = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' + (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
)
END = b"\r\n--b--\r\n"


def error_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["code"])


async def kept(service: Service) -> int:
    """Return how many files have bytes in the store, complete or not."""
    return len(await asyncio.to_thread((await service.storage()).blobs.sizes))


def test_a_file_that_stops_coming_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stops() -> AsyncIterator[bytes]:
        yield BEGUN
        await asyncio.Event().wait()

    async def check() -> None:
        async with service.client() as client:
            with monkeypatch.context() as patched:
                patched.setattr("alignedserve.gateway.http.bodies.FILE_S", 0.05)
                given_up = await client.post("/v1/files", content=stops(), headers=FORM)
            assert error_of(given_up, 408) == "request_timeout"
            assert given_up.headers["connection"] == "close"
            assert await kept(service) == 0
            assert (await upload(client, b"x")).status_code == 200

    service.run(check)


def test_what_has_come_buys_time(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.http.bodies.FILE_BYTES_PER_S", 100)

    async def slowly() -> AsyncIterator[bytes]:
        monkeypatch.setattr("alignedserve.gateway.http.bodies.FILE_S", 0.2)  # holds from the next part on
        yield BEGUN + b"x" * 20_000
        await asyncio.sleep(0.5)
        yield END

    async def check() -> None:
        async with service.client() as client:
            assert (await client.post("/v1/files", content=slowly(), headers=FORM)).json()["bytes"] == 20_000

    service.run(check)


def test_uploads_of_a_key_are_bounded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.files.MOST_TRANSFERS", 3)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def waits() -> AsyncIterator[bytes]:
        begun.set()
        yield BEGUN + b"x"
        await go_on.wait()
        yield END

    async def check() -> None:
        async with service.client("ann") as ann, service.client("bob") as bob:
            first = asyncio.create_task(ann.post("/v1/files", content=waits(), headers=FORM))
            await begun.wait()
            second = await upload(ann, b"x")
            assert (error_of(second, 429), second.headers["retry-after"]) == ("rate_limit_exceeded", "1")
            assert (await upload(bob, b"x")).status_code == 200
            go_on.set()
            assert (await first).status_code == 200
            assert (await upload(ann, b"x")).status_code == 200

    service.run(check)


def test_uploads_on_their_way_count_as_their_key_s_bytes(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight uploads that never ended took 1.6 GB, in no quota."""
    monkeypatch.setattr("alignedserve.gateway.http.uploading._PIECE_BYTES", 65_536)
    service = Service(text, FakeOwner(hello), replace(config, jobs=replace(config.jobs, quota_mb=1)))
    begun, go_on, taken = asyncio.Event(), asyncio.Event(), 0

    async def waits() -> AsyncIterator[bytes]:
        yield BEGUN
        yield b"x" * 700_000
        begun.set()
        await go_on.wait()
        yield END

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        yield BEGUN
        while True:
            taken += 65_536
            yield b"x" * 65_536

    async def check() -> None:
        async with service.client("ann") as ann, service.client("bob") as bob:
            first = asyncio.create_task(ann.post("/v1/files", content=waits(), headers=FORM))
            await begun.wait()
            refused = await ann.post("/v1/files", content=endless(), headers=FORM)
            assert error_of(refused, 413) == "quota_exceeded"
            assert taken < 500_000
            assert (await upload(bob, b"x" * 900_000)).status_code == 200
            go_on.set()
            assert (await first).status_code == 200
            assert error_of(await upload(ann, b"x" * 400_000), 413) == "quota_exceeded"
            assert (await upload(ann, b"x" * 200_000)).status_code == 200
            assert await kept(service) == 3

    service.run(check)


@pytest.mark.parametrize(
    ("begun", "more", "code"),
    [
        (b"", b"--b\r\n\r\n\r\n" * 512, "form_too_large"),  # parts without anything
        (b"--b\r\n", b"X-Y: zzzzzzzz\r\n" * 512, None),  # headers
        (BEGUN + b"x" + END, b"\r\n" * 4096, "form_too_large"),  # after the end of the form
        (BEGUN + b"x\r\n", b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 64, "form_too_large"),
    ],
    ids=["empty parts", "headers", "after the end", "empty fields"],
)
def test_all_of_a_form_counts(service: Service, begun: bytes, more: bytes, code: str | None) -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        yield begun
        while True:
            taken += len(more)
            yield more

    async def check() -> None:
        async with service.client() as client:
            refused = await client.post("/v1/files", content=endless(), headers=FORM)
            assert refused.status_code == 400
            assert code in (None, refused.json()["error"]["code"])
            assert taken <= MOST_BESIDE_BYTES + len(more)
            assert await kept(service) == 0
            assert (await upload(client, b"x")).status_code == 200

    service.run(check)


@pytest.mark.parametrize(
    ("boundary", "line", "status"),
    [
        ("b", b"\r\n--c", 200),
        ("b" * 60, b"\r\n--" + b"b" * 59 + b"c", 200),
        ("b", b"\r\n--b-", 400),  # RFC 2046: no line of a part begins with the boundary
        ("b", b"\r\n--bc", 400),
        ("b", b"\r", 200),
    ],
    ids=["short", "long", "closing", "longer", "begun"],
)
def test_near_boundaries_take_no_longer_than_other_bytes(
    service: Service, boundary: str, line: bytes, status: int
) -> None:
    """64 KiB of lines that were boundaries but for a byte took the event loop 10 to 20 ms, byte by byte."""
    between, lines = f"\r\n--{boundary}".encode(), 0
    file = (line * SLICE_BYTES)[: 4 * SLICE_BYTES]
    head = BEGUN.replace(b"--b\r\n", between[2:] + b"\r\n")

    def count(frame: Any, *_: Any) -> Any:
        nonlocal lines
        lines += frame.f_code.co_filename == uploading.__file__ or "multipart" in frame.f_code.co_filename
        return count

    async def check() -> None:
        async with service.client() as client:
            form = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
            sys.settrace(count)
            answer = await client.post("/v1/files", content=head + file + between + b"--", headers=form)
            sys.settrace(None)
            assert answer.status_code == status, answer.text
            assert lines < 2_000
            if status == 200:
                assert (await client.get(f"/v1/files/{answer.json()['id']}/content")).content == file

    service.run(check)


@pytest.mark.parametrize("most", [1, 2, 7, 1000])
def test_a_form_is_read_however_it_is_cut(service: Service, most: int) -> None:
    async def cut() -> AsyncIterator[bytes]:
        data = BEGUN + b"\r\n--\r\n--c\r" * 20 + END
        for start in range(0, len(data), most):
            yield data[start : start + most]

    async def check() -> None:
        async with service.client() as client:
            file = (await client.post("/v1/files", content=cut(), headers=FORM)).json()
            got = await client.get(f"/v1/files/{file['id']}/content")
            assert got.content == b"\r\n--\r\n--c\r" * 20

    service.run(check)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (b"x" + BEGUN + END, "begin with its boundary"),
        (b"--b\r\nname\r\n\r\nx" + END, "no colon"),
        (b"--b\r\nX: " + b"a" * 10_000, "the head of a part"),
        (b"--b-\r\n\r\n", "does not end there"),
        (BEGUN, "ends too early"),
    ],
)
def test_broken_forms_are_told_why(service: Service, form: bytes, said: str) -> None:
    async def check() -> None:
        async with service.client() as client:
            refused = await client.post("/v1/files", content=form, headers=FORM)
            assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text

    service.run(check)


def test_the_event_loop_turns_between_the_slices_of_a_form(service: Service) -> None:
    """A part of the body is as large as the network makes it."""
    turns, while_read = 0, 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def once() -> AsyncIterator[bytes]:
        nonlocal while_read
        before = turns
        yield BEGUN + b"x" * (20 * SLICE_BYTES) + END
        while_read = turns - before

    async def check() -> None:
        async with service.client() as client:
            ticking = asyncio.create_task(tick())
            answer = await client.post("/v1/files", content=once(), headers=FORM)
            ticking.cancel()
            assert answer.status_code == 200
            assert while_read >= 20

    service.run(check)


def test_compressed_files_and_batches_are_refused(service: Service) -> None:
    async def check() -> None:
        async with service.client() as client:
            for path in ("/v1/files", "/v1/batches"):
                packed = await client.post(path, content=b"x", headers={**FORM, "Content-Encoding": "gzip"})
                assert error_of(packed, 415) == "unsupported_encoding"

    service.run(check)


def test_a_client_that_reads_nothing_of_a_file_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with service.client() as client:
            file = (await upload(client, b"x" * 1_000_000)).json()
            path = f"/v1/files/{file['id']}/content"
            reader = StuckReader(path, b"ann")
            with monkeypatch.context() as patched:
                patched.setattr(GatewaySettings, "stalled_client_s", 0.05)
                await service.app(reader.scope, reader.receive, reader.send)
            assert reader.sent == []
            assert len((await client.get(path)).content) == 1_000_000

    service.run(check)


class StuckReader(Connection):
    """A client that asks for a file and reads nothing of it."""

    def __init__(self, path: str, key: bytes) -> None:
        super().__init__(path, b"")
        self.scope |= {"method": "GET", "headers": [(b"authorization", b"Bearer " + key)]}
        self.reads.clear()
        self.begun = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.begun.set()
        await super().send(message)


def test_slow_downloads_of_a_key_leave_others_theirs(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.files.MOST_TRANSFERS", 4)

    async def check() -> None:
        async with service.client("ann") as ann, service.client("bob") as bob:
            anns, bobs = [(await upload(client, b"x" * 1_000_000)).json()["id"] for client in (ann, bob)]
            readers = [StuckReader(f"/v1/files/{anns}/content", b"ann") for _ in range(2)]
            stuck = [asyncio.create_task(service.app(it.scope, it.receive, it.send)) for it in readers]
            for reader in readers:
                await reader.begun.wait()
            for refused in (await ann.get(f"/v1/files/{anns}/content"), await upload(ann, b"x")):
                assert (error_of(refused, 429), refused.headers["retry-after"]) == ("rate_limit_exceeded", "1")
            assert len((await bob.get(f"/v1/files/{bobs}/content")).content) == 1_000_000
            assert (await upload(bob, b"x")).status_code == 200
            for reader in readers:
                reader.left.set()
            await asyncio.gather(*stuck)
            assert (await ann.get(f"/v1/files/{anns}/content")).status_code == 200

    service.run(check)


async def submit(client: httpx.AsyncClient, body: bytes | AsyncIterator[bytes]) -> httpx.Response:
    return await client.post("/v1/batches", content=body, headers={"Content-Type": "application/json"})


def test_the_body_of_a_batch_has_limits(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatewaySettings, "body_limit_s", 0.05)
    service = Service(text, FakeOwner(hello), config)

    async def stops() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def check() -> None:
        async with service.client() as client:
            assert error_of(await submit(client, stops()), 408) == "request_timeout"
            assert error_of(await submit(client, b" " * 100_000), 413) == "request_too_large"
            for body in (b"[" * 5000, b"[]", b"\xff", b'{"endpoint": "\\ud800"}', b""):
                assert error_of(await submit(client, body), 400) == "invalid_json"
            plain = await client.post("/v1/batches", content=b"{}", headers={"Content-Type": "text/plain"})
            assert error_of(plain, 415) == "unsupported_content_type"
            file = (await upload(client, line("a"))).json()
            asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "1h"}
            assert (await submit(client, json.dumps(asked).encode())).status_code == 200

    service.run(check)
