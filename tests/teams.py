"""Teams of ranks in one process, for tests."""

from __future__ import annotations

import socket

import torch

from alignedserve.engine.device.rank_link import RankLink, TeamLinks
from alignedserve.engine.device.ranks import Team


def links_of(size: int) -> list[dict[int, RankLink]]:
    """Connect every rank with every other."""
    links: list[dict[int, RankLink]] = [{} for _ in range(size)]
    for rank in range(size):
        for other in range(rank):
            links[rank][other], links[other][rank] = map(RankLink, socket.socketpair())
    return links


def teams(size: int) -> list[Team]:
    """Return the ranks of one worker on CPUs."""
    ends = zip(links_of(size), links_of(size), links_of(size), strict=True)
    return [Team(rank, size, TeamLinks(*links), torch.device("cpu")) for rank, links in enumerate(ends)]
