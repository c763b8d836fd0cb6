"""The ranks of a worker meet, at sockets in a folder that only their user can open: all are on one machine.

    rank 1, 2 ── said, told, tensors ──▶ rank 0
    rank 2 ───── tensors ──▶ rank 1

Each connection begins with proofs of a secret by the deployment's keys (joining.py). Once all have met, none listens.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import closing, suppress
from pathlib import Path

import torch

from alignedserve.engine.device.groups import BrokenGroup
from alignedserve.engine.device.ranks import SHORT, RankLink, Team, TeamLinks
from alignedserve.errors import RankLost
from alignedserve.protocol.messages import rank_suffix
from alignedserve.shell.control import private_socket
from alignedserve.shell.part import PartSpec
from alignedserve.transport.joining import admitted, entered, listening

_MEETING_S = 300.0  # ranks do not start at the same time
_ANSWER_S = 10.0  # for a rank's proof
_PAUSE_S = 0.02  # until a rank listens


def meet(spec: PartSpec, size: int, device: torch.device, meeting_s: float = _MEETING_S) -> Team:
    """Connect this rank with the others of its life. Raises RankLost if they do not come in time."""
    assert spec.keys is not None, f"{spec.name} has no keys for its links"
    secret = spec.keys.secret_of(f"ranks of {spec.deployment}-{spec.worker}.{spec.incarnation}")
    own, deadline = spec.rank, time.monotonic() + meeting_s
    links: defaultdict[str, dict[int, RankLink]] = defaultdict(dict)
    try:
        with listening(str(door_of(spec, own))) as door, closing(admitted(door, secret, deadline)) as coming:
            for rank in range(own):
                for purpose in ("tensors",) if rank else TeamLinks._fields:
                    links[purpose][rank] = link = _entered(door_of(spec, rank), secret, deadline)
                    link.tell(f"{purpose} {own}".encode())
            for _ in range((size - 1 - own) * (1 if own else len(TeamLinks._fields))):
                link = RankLink(next(coming))
                link.socket.settimeout(max(_PAUSE_S, deadline - time.monotonic()))
                purpose, number = link.hear(SHORT).decode().split()
                link.socket.settimeout(None)
                links[purpose][int(number)] = link
    except (OSError, BrokenGroup) as error:
        raise RankLost(f"the ranks of this worker do not meet: {error}") from None
    finally:
        door_of(spec, own).unlink(missing_ok=True)
    return Team(own, size, TeamLinks(**links), device)


def door_of(spec: PartSpec, rank: int) -> Path:
    """Return where a rank of this worker's life listens."""
    return private_socket(f"{spec.deployment}-{spec.worker}{rank_suffix(rank)}.{spec.incarnation}-ranks")


def _entered(door: Path, secret: bytes, deadline: float) -> RankLink:
    while (left_s := deadline - time.monotonic()) > 0:
        with suppress(OSError, BrokenGroup):  # it does not listen yet, or too many strangers came
            return RankLink(entered(str(door), secret, min(left_s, _ANSWER_S)))
        time.sleep(_PAUSE_S)
    raise BrokenGroup(f"no rank has let this one in at {door} in time")
