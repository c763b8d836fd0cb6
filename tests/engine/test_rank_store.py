"""Tests of the store by which ranks make NCCL's communicator: it is driven as torch's ProcessGroupNCCL drives stores.

That sets the id of rank 0 and gets it elsewhere, through a prefix; its threads check and set keys meanwhile, and get
those that are there. Gloo's groups, which do more, stand in for it here: NCCL needs GPUs.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

from alignedserve.engine.device import rank_store
from alignedserve.engine.device.rank_store import RankStore
from alignedserve.errors import RankLost
from tests.teams import links_of

DEADLINE_S = 60.0


def stores(size: int) -> tuple[list[RankStore], list[Any]]:
    """Return the stores of all ranks, and those behind a prefix; torch does not declare that values are bytes."""
    plain = [RankStore(links) for links in links_of(size)]
    return plain, [PrefixStore("tensors", store) for store in plain]


@pytest.mark.parametrize("size", [2, 3])
def test_the_id_of_rank_0_reaches_all_whoever_is_first(size: int) -> None:
    _kept, prefixed = stores(size)
    with ThreadPoolExecutor(size) as pool:
        for number in range(20):
            nccl_id, key = os.urandom(128), str(number)
            waiting = [pool.submit(store.get, key) for store in prefixed[1:]]
            if number % 2:
                time.sleep(0.01)
            prefixed[0].set(key, nccl_id)
            assert [each.result(DEADLINE_S) for each in waiting] == [nccl_id] * (size - 1)


def test_threads_of_torch_ask_for_failures_and_tell_of_them_meanwhile() -> None:
    plain, prefixed = stores(2)
    is_over = threading.Event()
    seen: list[bytes] = []

    def watch() -> None:
        while not plain[0].check(["exception_dump"]):
            assert not is_over.wait(0.001)
        seen.append(plain[0].get("exception_dump"))

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(1) as pool:
        for number in range(50):
            got = pool.submit(prefixed[1].get, str(number))
            prefixed[0].set(str(number), b"\0\xff")
            assert got.result(DEADLINE_S) == b"\0\xff"
    assert watching.is_alive()
    plain[1].set("exception_dump", b"\1\0\0\0")
    watching.join(DEADLINE_S)
    is_over.set()
    assert seen == [b"\1\0\0\0"]


def test_what_nobody_sets_is_waited_for_until_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    _kept, prefixed = stores(2)
    assert not prefixed[0].check(["a"])
    with pytest.raises(RankLost, match="no rank has set"):
        prefixed[0].wait(["a"], timedelta(seconds=0.05))
    monkeypatch.setattr(rank_store, "_LIMIT", timedelta(seconds=0.05))
    with pytest.raises(RankLost, match="no rank has set"):
        prefixed[0].get("a")


def test_groups_of_torch_meet_by_it() -> None:
    from torch.distributed import ProcessGroupGloo

    _kept, prefixed = stores(3)

    def summed(rank: int) -> float:
        gloo: Any = ProcessGroupGloo  # torch does not declare all of its attributes
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        group = gloo(prefixed[rank], rank, 3, options)
        x = torch.ones(4) * rank
        group.allreduce([x]).wait()
        return float(x[0])

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(summed, range(3))] == [3.0] * 3
