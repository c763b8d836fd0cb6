"""Measure how fast KV goes from worker to worker by each transport, against memcpy of the same number of bytes.

    python -m lab.benchmarks.roads                 # half a minute
    python -m lab.benchmarks.roads --device cuda   # CUDA IPC within one GPU, and from GPU to GPU where there are two

Two workers in processes of their own, with the threads, frames and checks that workers have, send requests of 4,096
tokens of a model with 12 layers and 768-wide K and V in bf16 (151 MB), in blocks of 16 at random places. Rates on CPUs
count the processor time of both ends, since other work may share the cores: loopback copies into the kernel and out
again. `bare` is a group alone, sending a buffer of as many bytes. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import torch

from alignedserve.core import Role
from alignedserve.engine.device.devices import finish
from alignedserve.engine.device.groups import Group
from alignedserve.engine.device.pace import CopyPace
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.events import KvSent
from alignedserve.protocol.messages import Member
from alignedserve.shell.link_keys import DeploymentKeys, LinkKeys
from alignedserve.transport.direct import Direct
from alignedserve.transport.mailbox import Mailbox
from alignedserve.transport.mapping import CacheFile, CudaMaps, Maps
from alignedserve.transport.payload import DeviceBlocks
from alignedserve.transport.transport import Outcome, Transfer
from alignedserve.transport.turns import communicators_on

LAYERS, KV_DIM, BLOCK, TOKENS = 12, 768, 16, 4096
BLOCKS = TOKENS // BLOCK
BYTES = LAYERS * 2 * TOKENS * KV_DIM * 2
ROUNDS, LIMIT_S = 12, 120.0
GOAL = 0.8  # of a copy
ANYWHERE = [tuple(random.Random(seed).sample(range(BLOCKS), BLOCKS)) for seed in (1, 2)]  # blocks of either end


def best(piece: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the GB/s of the best run but a tenth, after one that warms up."""
    took = []
    for _ in range(ROUNDS):
        began = clock()
        piece()
        took.append(clock() - began)
    return BYTES / sorted(took[1:])[len(took) // 10] / 1e9


class RoadEnd:
    """One end: its cache, and the transport that moves what is in it."""

    def __init__(
        self, name: str, device: torch.device, folder: Path | None, keys: LinkKeys, *, verify: bool, ipc: bool
    ) -> None:
        maps: Maps | None = None
        cache = torch.randn(LAYERS, 2 * BLOCKS, BLOCK, KV_DIM, dtype=torch.bfloat16, device=device)
        if ipc and folder is not None:
            maps = file = CacheFile(folder, "roads-", f"roads-{name}.cache")
            cache = file.zeros(cache.shape, cache.dtype).copy_(cache)
        elif ipc:
            maps = CudaMaps(device)
        self.transport = Direct(
            *(f"{name}.1", Mailbox(keys, "127.0.0.1"), DeviceBlocks(cache), CopyPace(share=1.0)),
            verify=verify,
            timeout_s=LIMIT_S,
            maps=maps,
            communicators=None if ipc else communicators_on(device),
        )
        self.address = self.transport.address
        self._ended = queue.SimpleQueue[Outcome]()

    def meet(self, name: str, address: str) -> None:
        self.transport.meet(Member(name, Role(name.partition("-")[0]), "local", 1, "", address))

    def run(self, transfer: Transfer) -> None:
        self.transport.start(transfer, self._ended.put)
        outcome = self._ended.get(timeout=LIMIT_S)
        if not (outcome.ok if isinstance(outcome, KvSent) else outcome.intact):
            raise SystemExit(f"a transfer failed, so the figures are not valid: {outcome}")


def send_what_is_asked_for(
    asked: Connection, device: torch.device, folder: Path | None, keys: LinkKeys, kinds: dict[str, bool]
) -> None:
    """Run the source in a process of its own; tell the seconds that it has computed after each transfer."""
    torch.set_num_threads(1)
    source = RoadEnd("prefill-0", device, folder, keys, **kinds)
    asked.send(source.address)
    source.meet("decode-0", asked.recv())
    with closing(source.transport):
        for number in iter(asked.recv, 0):
            source.run(SendKv(number, "decode-0.1", ANYWHERE[0], tuple(range(TOKENS))))
            asked.send(time.process_time())


class Pair:
    """A prefill worker in another process, and a decode worker in this one."""

    def __init__(self, devices: Sequence[torch.device], folder: Path | None, *, verify: bool, ipc: bool) -> None:
        context, kinds = multiprocessing.get_context("spawn"), {"verify": verify, "ipc": ipc}
        self._source, far_end = context.Pipe()
        keys = DeploymentKeys.new().parts
        arguments = far_end, devices[0], folder, keys, kinds
        self._process = context.Process(target=send_what_is_asked_for, args=arguments, daemon=True)
        self._process.start()
        self._worker = RoadEnd("decode-0", devices[1], folder, keys, **kinds)
        self._worker.meet("prefill-0", self._source.recv())
        self._source.send(self._worker.address)
        self._number, self._computed_s = 0, 0.0

    def send(self) -> None:
        """Send the request, and wait until both ends have ended."""
        self._number += 1
        self._source.send(self._number)
        self._worker.run(ReceiveKv(self._number, "prefill-0.1", ANYWHERE[1], tuple(range(TOKENS))))
        self._computed_s = self._source.recv()

    def computed_s(self) -> float:
        """Return the processor seconds of both ends."""
        return time.process_time() + self._computed_s

    def close(self) -> None:
        self._source.send(0)
        self._worker.transport.close()
        self._process.join(LIMIT_S)


@contextmanager
def bare_group() -> Iterator[Callable[[], None]]:
    """Yield a function that sends a buffer of as many bytes over a group, without our frames and blocks."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        source, to = Group(socket.create_connection(door.getsockname()), LIMIT_S), Group(door.accept()[0], LIMIT_S)
    here, there = (torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2))

    def send() -> None:
        sending = Thread(target=source.send, args=(here, 1))
        sending.start()
        to.receive(there, 1).land(LIMIT_S)
        sending.join()

    yield send
    for group in (source, to):
        group.close()


def on_cpus() -> None:
    torch.set_num_threads(1)
    here, there = (torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2))
    memcpy = best(lambda: there.copy_(here), time.process_time)
    report("memcpy", memcpy, "GB/s")
    with bare_group() as send:
        bare = best(send, time.process_time)
    report("bare group", bare, "GB/s", baseline=memcpy)
    cpus = torch.device("cpu"), torch.device("cpu")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for verify in (False, True):
            checked, share = (", with checksums", 0.0) if verify else ("", GOAL)
            with closing(Pair(cpus, Path(folder), verify=verify, ipc=True)) as pair:
                rate = best(pair.send, pair.computed_s)
                report(f"ipc{checked}", rate, "GB/s", baseline=memcpy, goal=share * memcpy or None, at_least=True)
            with closing(Pair(cpus, None, verify=verify, ipc=False)) as pair:
                rate = best(pair.send, pair.computed_s)
                report(f"collective{checked}", rate, "GB/s", baseline=bare, goal=share * bare or None, at_least=True)


def copy(here: torch.Tensor, there: torch.Tensor) -> None:
    there.copy_(here)
    for end in (here, there):
        finish(end.device)


def on_gpus() -> None:
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if not devices:
        raise SystemExit("torch sees no GPU")
    for first, second in ((devices[0], devices[0]), *([(devices[0], devices[1])] if len(devices) > 1 else [])):
        here, there = (torch.zeros(BYTES, dtype=torch.uint8, device=device) for device in (first, second))
        copied = best(partial(copy, here, there), time.monotonic)
        what = "one GPU" if first == second else "two GPUs"
        report(f"a copy, {what}", copied, "GB/s")
        for ipc in (True, False):
            if ipc or first != second:
                with closing(Pair((first, second), None, verify=False, ipc=ipc)) as pair:
                    rate = best(pair.send, time.monotonic)
                name = "ipc" if ipc else "collective"
                report(f"{name}, {what}", rate, "GB/s", baseline=copied, goal=GOAL * copied, at_least=True)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what has the KV (default: cpu)")
    args = parser.parse_args()
    (on_gpus if args.device == "cuda" else on_cpus)()
    sys.exit(status())


if __name__ == "__main__":
    main()
