"""The table of packings: a new packing is a file in this folder, a line here, and its name in `policy.Packing`.

fcfs         by arrival; the newest request leaves. With a waiting ratio, prompts interrupt decodes (TGI)
longest      by arrival; the longest leaves, of the old batch while another takes its place (AlignedServe §3.4)
round_robin  real-time and best-effort requests in alternate steps, each by arrival; the newest leaves
mlfq         the requests that were served least, in five levels, by arrival within each; the one served most leaves
skip_join    the same, and a long prompt counts as service before it has run (FastServe §4.1)
knapsack     every request that has memory, in steps of one type or of both; which request has memory is chosen
rt_be        by promises (selection.py), at most B_curr in a step; best-effort requests leave for real-time ones. By
             levels, requests leave for requests of higher levels (ALISE, Algorithm 2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from alignedserve.decode_worker.packing.knapsack import Knapsack
from alignedserve.decode_worker.packing.levels import ByLevels, SkipJoin
from alignedserve.decode_worker.packing.longest import LongestLeaves
from alignedserve.decode_worker.packing.packer import Packer, PackingSetup
from alignedserve.decode_worker.packing.promises import GrowingBatch
from alignedserve.decode_worker.packing.swapping import Swapping
from alignedserve.decode_worker.packing.turns import Ratio, RoundRobin
from alignedserve.scheduling.policy import Packing


def _first_come(setup: PackingSetup) -> Packer:
    return Ratio(setup) if setup.policy.waiting_ratio else Packer(setup)


def _by_promises(setup: PackingSetup) -> Packer:
    """Return the packing of rt_be, where best-effort requests give way to real-time ones: only by slack do they.

    By levels, requests of lower levels give way to requests of higher ones."""
    if setup.policy.swaps:
        return Swapping(setup)
    return GrowingBatch(setup) if setup.policy.precedence.may_displace(is_rt=True) else Packer(setup)


PACKINGS: Mapping[Packing, Callable[[PackingSetup], Packer]] = {
    Packing.FCFS: _first_come,
    Packing.LONGEST: LongestLeaves,
    Packing.ROUND_ROBIN: RoundRobin,
    Packing.MLFQ: ByLevels,
    Packing.SKIP_JOIN: SkipJoin,
    Packing.KNAPSACK: Knapsack,
    Packing.RT_BE: _by_promises,
}


def packer(setup: PackingSetup) -> Packer:
    return PACKINGS[setup.policy.packing](setup)
