"""Ranks as processes of their own, which on CPUs map each other's memory as ranks on GPUs do."""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from alignedserve.engine.device.rank_link import RankLink, TeamLinks
from alignedserve.engine.device.ranks import Team

LIMIT_S = 120.0
_Pairs = dict[tuple[int, int, str], tuple[socket.socket, socket.socket]]
FORKS = multiprocessing.get_context("forkserver")
_TESTS = "tests.kernels.test_sums", "tests.engine.test_shared_sums"
FORKS.set_forkserver_preload([__name__, "tests.transport.peer", *_TESTS])


class FileMaps:
    """Memory in files that all ranks map."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def handle(self, memory: torch.Tensor) -> bytes:
        path = self._folder / f"of-{self._rank}"
        if not path.exists():
            path.write_bytes(memory.numpy().tobytes())
            memory.set_(self.map(path.name.encode()).untyped_storage(), 0, memory.shape, (1,))
        return path.name.encode()

    def map(self, handle: bytes) -> torch.Tensor:
        with (self._folder / handle.decode()).open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def run_ranks(size: int, work: Callable[..., Any], *arguments: Any, device: str = "cpu") -> list[Any]:
    """Return what `work(team, *arguments)` returns in each of these processes, or the text of its error. The team sums
    on CPUs, or each rank on a GPU of its own."""
    below = [(rank, other) for rank in range(size) for other in range(rank)]
    pairs: _Pairs = {(*two, kind): socket.socketpair() for two in below for kind in "std"}
    ends = [
        [{other: _end(pairs, rank, other, kind) for other in range(size) if other != rank} for kind in "std"]
        for rank in range(size)
    ]
    processes, results = [], list[Connection]()
    for rank in range(size):
        ours, theirs = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=_be_rank, args=(rank, device, ends[rank], theirs, work, arguments), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        results.append(ours)
    for pair in pairs.values():
        for end in pair:
            end.close()
    try:
        for of in results:
            assert of.poll(LIMIT_S), "a rank waits for ever"
        return [pickle.loads(of.recv_bytes()) for of in results]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _end(pairs: _Pairs, rank: int, other: int, kind: str) -> socket.socket:
    first, second = pairs[max(rank, other), min(rank, other), kind]
    return first if rank > other else second


def _be_rank(rank: int, kind: str, ends: Any, to: Connection, work: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    links = TeamLinks(*({other: RankLink(end) for other, end in of.items()} for of in ends))
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        said = work(Team(rank, len(ends[0]) + 1, links, device), *arguments)
    except BaseException:
        said = traceback.format_exc()
    to.send_bytes(pickle.dumps(said))  # not by `send`: torch would share tensors with a process that ends


class Heard(logging.Handler):
    """Keeps what a rank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        log = logging.getLogger("alignedserve.engine")
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
