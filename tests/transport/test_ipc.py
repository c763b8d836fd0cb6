"""Tests of a receiver that reads the source's memory: it gets the right bytes, or the event says that it did not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.engine.device.groups import Group
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.transport import ipc, payload
from alignedserve.transport.frames import Reply
from alignedserve.transport.ipc import MappingSender
from alignedserve.transport.mapping import CacheFile, CudaMaps, NotMapped
from alignedserve.transport.meeting import Direction
from alignedserve.transport.payload import DeviceBlocks
from tests.transport.conftest import MakeNode
from tests.transport.nodes import PREFIX, SOON_S, Node, meet
from tests.transport.test_transfers import HERE, arrives, order

pytestmark = [pytest.mark.parametrize("shared", ["ipc"], indirect=True), pytest.mark.usefixtures("shared")]
WAIT_S = 60.0


def num_mapped(node: Node) -> int:
    """Return how often this process maps the node's device cache."""
    return Path("/proc/self/maps").read_text().count(f"{PREFIX}{node.holder}.cache")


@contextmanager
def held_at_the_second_chunk(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Stop before the second chunk is put into blocks: the first event says that it is there, the second lets it go
    on."""
    touch, touched, go_on, touches = DeviceBlocks.copy, threading.Event(), threading.Event(), [0]

    def holding(*args: Any) -> None:
        touches[0] += 1
        if touches[0] == 2:
            touched.set()
            assert go_on.wait(WAIT_S)
        touch(*args)

    with monkeypatch.context() as patched:
        patched.setattr(payload, "CHUNK_BYTES", 1)  # one chunk per block
        patched.setattr(DeviceBlocks, "copy", holding)
        yield touched, go_on


@contextmanager
def half_read(monkeypatch: pytest.MonkeyPatch, source: Node, to: Node, number: int) -> Iterator[None]:
    """Stop a transfer when the receiver has part of it; let it go on at the end, and check that it failed."""
    with held_at_the_second_chunk(monkeypatch) as (touched, go_on):
        send, receive = order(source, to, number)
        source.start(send)
        to.start(receive)
        assert touched.wait(WAIT_S)
        yield
        go_on.set()
        assert to.outcome() == KvReceived(number, source.holder, intact=False)


def test_a_peer_s_cache_is_mapped_once_and_dropped_with_its_life(node_of: MakeNode) -> None:
    source, to = node_of("prefill-0"), node_of("decode-0")
    meet(source, to)
    own = num_mapped(source)
    assert arrives(source, to, 1)
    assert num_mapped(source) == own + 1
    with source.hurried():
        source.start(order(source, to, 2)[0])
        assert source.outcome() == KvSent(2, to.holder, ok=False), "the group breaks"
    to.start(order(source, to, 2)[1])
    assert to.outcome() == KvReceived(2, source.holder, intact=False)
    assert arrives(source, to, 3)
    assert num_mapped(source) == own + 1, "over another group it is the same"
    channel = to.transport._channels[Direction(source.holder, to.holder)]
    to.transport.part_from(source.member)
    channel.join()
    assert num_mapped(source) == own


def test_what_is_overwritten_while_it_is_read_is_not_used(node_of: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source has given up, so its blocks may belong to another request."""
    source, to = node_of("prefill-0", verify=False), node_of("decode-0", verify=False)
    meet(source, to)
    assert arrives(source, to, 1)
    hear, is_held = MappingSender._hear, threading.Event()

    def soon_given_up(self: MappingSender, group: Group, number: int, timeout_s: float | None = None) -> Reply:
        """Give up soon on each reply of the second transfer but the answer to its header."""
        if number != 2 or timeout_s is not None:
            return hear(self, group, number, timeout_s)
        assert is_held.wait(WAIT_S)
        return hear(self, group, number, SOON_S)

    monkeypatch.setattr(MappingSender, "_hear", soon_given_up)
    with half_read(monkeypatch, source, to, 2):
        is_held.set()
        assert source.outcome() == KvSent(2, to.holder, ok=False)
        source.cache.view(torch.int16)[:] = 7
    assert arrives(source, to, 3)


def test_a_reader_that_takes_long_says_that_it_goes_on(node_of: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source waits as long as it hears from the reader, however long all of it takes."""
    source, to, said = node_of("prefill-0"), node_of("decode-0"), list[Reply]()
    meet(source, to)
    hear = MappingSender._hear

    def heard(*args: Any) -> Reply:
        said.append(hear(*args))
        return said[-1]

    monkeypatch.setattr(payload, "CHUNK_BYTES", 1)  # one chunk per block
    monkeypatch.setattr(ipc, "_REPLY_PART", float("inf"))  # the reader replies after every chunk
    monkeypatch.setattr(MappingSender, "_hear", heard)
    assert arrives(source, to, 1)
    assert said == [Reply.YES, *[Reply.GOES_ON] * len(HERE), Reply.YES]


def test_a_source_that_is_gone_when_all_is_read_makes_it_unread(
    node_of: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, to = node_of("prefill-0"), node_of("decode-0")
    meet(source, to)
    with half_read(monkeypatch, source, to, 1):
        source.transport.part_from(to.member)
        assert source.outcome() == KvSent(1, to.holder, ok=False)


def test_bytes_that_are_not_what_the_source_saw_are_not_used(
    node_of: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums find changed bytes, even where neither end has noticed."""
    source, to = node_of("prefill-0"), node_of("decode-0")
    meet(source, to)
    with half_read(monkeypatch, source, to, 1):
        source.cache.view(torch.int16)[:, 2 * HERE[-1]] ^= 1
    assert source.outcome() == KvSent(1, to.holder, ok=False)
    assert arrives(source, to, 2)


def test_what_cannot_be_mapped_fails(node_of: MakeNode, shared: Path) -> None:
    """The file belongs to a worker that has ended."""
    source, to = node_of("prefill-0"), node_of("decode-0")
    meet(source, to)
    (shared / f"{PREFIX}{source.holder}.cache").unlink()
    for number in (1, 2):
        send, receive = order(source, to, number)
        source.start(send)
        to.start(receive)
        assert source.outcome() == KvSent(number, to.holder, ok=False)
        assert to.outcome() == KvReceived(number, source.holder, intact=False)
    source.transport.close()
    assert to.transport.num_failed == 2


@pytest.mark.parametrize("name", ["/etc/passwd", "../alignedserve-test-x", "another", f"{PREFIX}../../etc/passwd", ""])
def test_nothing_but_device_caches_of_this_deployment_is_mapped(shared: Path, name: str) -> None:
    maps = CacheFile(shared, PREFIX, name)
    with pytest.raises(NotMapped, match="is no device cache of this deployment"):
        maps.map(maps.handle(torch.zeros(2, 4)))


@pytest.mark.parametrize(
    "handle", [b"", b"{}", b"[]", b'{"shape": [2], "dtype": "load"}', b'{"shape": [-2], "dtype": "int8"}']
)
def test_what_is_no_handle_is_not_mapped(shared: Path, handle: bytes) -> None:
    with pytest.raises(NotMapped, match="no handle"):
        CacheFile(shared, PREFIX, "mine").map(handle)


def test_a_mapped_cache_cannot_be_smaller_than_its_handle_says(shared: Path) -> None:
    file = CacheFile(shared, PREFIX, f"{PREFIX}small.cache")
    file.zeros(torch.Size([2, 8]), torch.bfloat16)
    with pytest.raises(NotMapped, match="cannot be mapped"):
        file.map(file.handle(torch.zeros(4, 8, dtype=torch.bfloat16)))
    file.close()
    assert not list(shared.glob("*small*"))


def test_a_handle_of_cuda_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle keeps what torch says of the memory, in the order in which torch wants it back. The test needs no
    CUDA."""
    memory = torch.arange(24, dtype=torch.bfloat16)
    says = (0, b"handle\0\1", 48, 0, b"counter", 3, b"event\xff", True)
    wants: list[Any] = []
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda _: says)

    def mapped(*args: Any) -> Any:
        wants.append(args)
        return memory.untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", mapped)
    maps = CudaMaps(torch.device("cpu"))
    there = maps.map(maps.handle(memory.view(2, 3, 4)))
    assert torch.equal(there, memory.view(2, 3, 4))
    assert wants == [says]


def test_memory_that_cuda_does_not_map_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs that do not read each other's memory, or in containers apart."""

    def refused(*_: Any) -> Any:
        raise RuntimeError("CUDA error: peer access is not supported between these two devices")

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda _: (0, b"", 48, 0, b"", 3, b"", True))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refused)
    maps = CudaMaps(torch.device("cpu"))
    with pytest.raises(NotMapped, match=r"does not map the other worker's device cache: .* peer access"):
        maps.map(maps.handle(torch.zeros(24, dtype=torch.bfloat16)))
