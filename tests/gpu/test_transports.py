"""Tests of KV between workers on GPUs, each in a process of its own: from mapped memory on one GPU, and on two, of
which the peer sees one; by NCCL on two."""

from __future__ import annotations

import multiprocessing
import os
import queue
from contextlib import closing
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec", reason="what parts tell each other is msgspec's: pip install msgspec")

from alignedserve.core import Role
from alignedserve.engine.device.devices import gpu_uuid
from alignedserve.engine.device.pace import CopyPace
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.protocol.messages import Member
from alignedserve.protocol.roads import Endpoint
from alignedserve.shell.link_keys import DeploymentKeys, LinkKeys
from alignedserve.transport.direct import Direct
from alignedserve.transport.mailbox import Mailbox
from alignedserve.transport.mapping import CudaMaps
from alignedserve.transport.opening import peers_of
from alignedserve.transport.payload import DeviceBlocks
from alignedserve.transport.transport import Outcome
from alignedserve.transport.turns import communicators_on

LAYERS, BLOCKS, BLOCK, KV_DIM = 4, 600, 16, 256
TOKENS = tuple(range(3000))  # several chunks, of 16 MB each
EACH = -(-len(TOKENS) // BLOCK)
ANSWER_S = 120.0
KEYS = DeploymentKeys.new().parts


def worker(name: str, gpu: int, by_ipc: bool, keys: LinkKeys) -> tuple[Direct, torch.Tensor]:
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    cache = torch.empty((LAYERS, 2 * BLOCKS, BLOCK, KV_DIM), dtype=torch.float32, device=device)
    cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(len(name))))
    reached = frozenset(uuid for uuid, is_read in peers_of(device).items() if is_read)
    on = Endpoint("", gpu_uuid(device), reached) if by_ipc else Endpoint("")
    by: dict[str, Any] = {"maps": CudaMaps(device)} if by_ipc else {"communicators": communicators_on(device)}
    by |= {"on": on, "node": "local"}
    blocks, mailbox = DeviceBlocks(cache), Mailbox(keys, "127.0.0.1")
    return Direct(f"{name}.1", mailbox, blocks, CopyPace(share=1.0), verify=True, timeout_s=60, **by), cache


def member(name: str, transport: Direct) -> Member:
    return Member(name, Role(name.partition("-")[0]), "local", 1, "", transport.address)


def serve(to_us: Connection, gpu: int, by_ipc: bool, keys: LinkKeys) -> None:
    """Run the other process: it reports what its cache holds, and sends what it is told to. It sees one GPU, as Ray's
    workers do."""
    os.environ["CUDA_VISIBLE_DEVICES"], gpu = visible(gpu), 0
    transport, cache = worker("prefill-0", gpu, by_ipc, keys)
    with closing(transport):
        to_us.send(asdict(member("prefill-0", transport)))
        fields = to_us.recv()
        transport.meet(Member(**(fields | {"role": Role(fields["role"])})))
        to_us.send(cache.cpu().numpy())
        outcomes: queue.Queue[Outcome] = queue.Queue()
        for number in iter(to_us.recv, None):
            transport.start(SendKv(number, "decode-0.1", tuple(range(EACH)), TOKENS), outcomes.put)
            to_us.send(outcomes.get() == KvSent(number, "decode-0.1", ok=True))


def visible(gpu: int) -> str:
    """Return the name of the GPU of this number, among those that this process sees."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return names.split(",")[gpu] if names else str(gpu)


@pytest.mark.parametrize(("by_ipc", "gpu"), [(True, 0), (True, 1), (False, 1)], ids=["one GPU", "two GPUs", "NCCL"])
def test_what_is_sent_is_there(by_ipc: bool, gpu: int) -> None:
    if torch.cuda.device_count() <= gpu:
        pytest.skip("there is one GPU")
    if by_ipc and gpu and not torch.cuda.can_device_access_peer(0, gpu):
        pytest.skip("the GPUs do not read each other's memory")
    context = multiprocessing.get_context("spawn")
    ours, far_end = context.Pipe()
    peer = context.Process(target=serve, args=(far_end, 0, by_ipc, KEYS), daemon=True)
    peer.start()
    transport, cache = worker("decode-0", gpu, by_ipc, KEYS)
    try:
        fields = ours.recv()
        transport.meet(Member(**(fields | {"role": Role(fields["role"])})))
        ours.send(asdict(member("decode-0", transport)))
        sent = torch.from_numpy(ours.recv())
        outcomes: queue.Queue[Outcome] = queue.Queue()
        there = tuple(range(BLOCKS - 1, BLOCKS - 1 - EACH, -1))
        for number in (1, 2, 3):
            ours.send(number)
            transport.start(ReceiveKv(number, "prefill-0.1", there, TOKENS), outcomes.put)
            assert outcomes.get(timeout=ANSWER_S) == KvReceived(number, "prefill-0.1", intact=True)
            assert ours.recv()
        got, whole = cache.cpu(), len(TOKENS) // BLOCK
        for here, block in zip(range(whole), there, strict=False):
            assert torch.equal(got[:, 2 * block : 2 * block + 2], sent[:, 2 * here : 2 * here + 2])
    finally:
        transport.close()
        peer.kill()
        peer.join()


def test_a_peer_that_is_killed_fails_what_is_outstanding() -> None:
    context = multiprocessing.get_context("spawn")
    ours, far_end = context.Pipe()
    peer = context.Process(target=serve, args=(far_end, 0, True, KEYS), daemon=True)
    peer.start()
    transport, _ = worker("decode-0", 0, True, KEYS)
    try:
        fields = ours.recv()
        there = Member(**(fields | {"role": Role(fields["role"])}))
        transport.meet(there)
        outcomes: queue.Queue[Outcome] = queue.Queue()
        transport.start(ReceiveKv(1, "prefill-0.1", tuple(range(EACH)), TOKENS), outcomes.put)
        peer.kill()
        transport.part_from(there)
        assert outcomes.get(timeout=ANSWER_S) == KvReceived(1, "prefill-0.1", intact=False)
    finally:
        transport.close()
        peer.join()
