"""Workers of a test: a device cache, and the transport that moves what is in it.

Each test waits for the outcome of a transfer, and fails if it waits in vain.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from alignedserve.core import Role
from alignedserve.engine.device.pace import CopyPace
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.messages import Member, rank_suffix
from alignedserve.protocol.roads import Endpoint
from alignedserve.shell.link_keys import DeploymentKeys, LinkKeys
from alignedserve.transport.direct import Direct
from alignedserve.transport.mailbox import Mailbox
from alignedserve.transport.mapping import CacheFile
from alignedserve.transport.payload import DeviceBlocks
from alignedserve.transport.transport import Outcome
from alignedserve.transport.turns import Communicators

LAYERS, NUM_BLOCKS, BLOCK_SIZE, KV_DIM = 3, 40, 4, 8
PREFIX = "alignedserve-test-"  # begins the name of each file
PATIENT_S = 60.0  # a time-out that ends nothing, however slow the machine is
SOON_S = 0.5  # a time-out that a test waits for
DEADLINE_S = 2 * PATIENT_S  # the longest wait of a test
HOST = "127.0.0.1"
KEYS = DeploymentKeys.new().parts
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def random_cache(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a cache of random bits, NaNs of every kind among them."""
    shape, bits = (LAYERS, 2 * NUM_BLOCKS, BLOCK_SIZE, KV_DIM), torch.iinfo(BITS[dtype])
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(bits.min, bits.max, shape, dtype=BITS[dtype], generator=generator).view(dtype)


@dataclass
class Node:
    name: str
    dtype: torch.dtype = torch.bfloat16
    timeout_s: float = PATIENT_S
    verify: bool = True
    incarnation: int = 1
    shared: Path | None = None  # folder of its device cache, which is a file, for `ipc`
    communicators: Communicators | None = None
    also_sends: bool = False  # to workers on other machines
    on_machine: str = "local"
    rank: int = 0
    keys: LinkKeys = KEYS
    mailbox_of: Callable[[LinkKeys, str], Mailbox] = Mailbox
    faults: threading.Event = field(default_factory=threading.Event)
    outcomes: queue.Queue[Outcome] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self.cache = random_cache(Random(f"{self.name}{self.rank or ''}").randrange(1 << 30), self.dtype)
        maps = None
        if self.shared is not None:
            maps = CacheFile(self.shared, PREFIX, f"{PREFIX}{self.holder}{rank_suffix(self.rank)}.cache")
            self.cache = maps.zeros(self.cache.shape, self.dtype).copy_(self.cache)
        self.transport = Direct(
            *(self.holder, self.mailbox_of(self.keys, HOST), DeviceBlocks(self.cache), CopyPace()),
            verify=self.verify,
            timeout_s=self.timeout_s,
            maps=maps,
            communicators=self.communicators,
            on=Endpoint("", "" if maps is None else "cpu", also_sends=self.also_sends),
            node=self.on_machine,
            rank=self.rank,
            fault=self.faults.set,
        )

    @property
    def holder(self) -> str:
        return f"{self.name}.{self.incarnation}"

    @property
    def member(self) -> Member:
        role = Role(self.name.partition("-")[0])
        return Member(self.name, role, self.on_machine, self.incarnation, "nowhere", self.transport.address)

    def start(self, transfer: SendKv | ReceiveKv) -> None:
        self.transport.start(transfer, self.outcomes.put)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Give transfers up soon inside the block. Transfers before and after it may take as long as they need."""
        ends = [end for end in (self.transport._sent, self.transport._mapped) if end is not None]
        for end in ends:
            object.__setattr__(end, "timeout_s", SOON_S)  # all channels share these ends
        yield
        for end in ends:
            object.__setattr__(end, "timeout_s", self.timeout_s)

    def outcome(self) -> Outcome:
        return self.outcomes.get(timeout=DEADLINE_S)

    def of(self, blocks: tuple[int, ...], num_tokens: int) -> torch.Tensor:
        """Return what the blocks hold of the first tokens, as bits."""
        halves = self.cache.view(BITS[self.dtype])
        both = [torch.cat([halves[:, 2 * block + half] for block in blocks], dim=1) for half in (0, 1)]
        return torch.stack(both)[:, :, :num_tokens]


def meet(*nodes: Node) -> None:
    for node in nodes:
        for neighbour in nodes:
            node.transport.meet(neighbour.member)
