"""Three plausible bugs that a test puts into the cores for a while: the fuzzer must find each.

Each bug is on a path that is taken after faults only, or by clients that leave: without these, all tests pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
from msgspec import structs

from alignedserve.kvpool.memory.pages import Pages
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.fuzzing.invariants import Rule
from alignedserve.owner.core import OwnerCore
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Output

Plant = Callable[[pytest.MonkeyPatch], None]


def lost_release(patch: pytest.MonkeyPatch) -> None:
    """Make the pool forget a waiting request that is cancelled, without freeing its pages."""

    def forget(pool: PoolCore, request: str) -> None:
        if pool._waiting.remove(request):
            return
        if request in pool._out:
            del pool._out[request]
            pool._pages.free_entry(request)

    patch.setattr(PoolCore, "_forget", forget)


def duplicated_token(patch: pytest.MonkeyPatch) -> None:
    """Make the owner cut repeated output off one token too early."""
    arrived = OwnerCore._arrived

    def one_less(owner: OwnerCore, output: Output) -> Output:
        owned = owner._open.get(output.request)
        if owned is not None and 0 < len(owned.output) - output.index <= len(output.tokens):
            return structs.replace(output, index=output.index + 1)
        return output

    def arrived_again(owner: OwnerCore, sender: str, outputs: Iterable[Output], now: float) -> list[Command]:
        return arrived(owner, sender, [one_less(owner, output) for output in outputs], now)

    patch.setattr(OwnerCore, "_arrived", arrived_again)


def endless_lease(patch: pytest.MonkeyPatch) -> None:
    """Let pages that a lost worker had leased stay leased."""
    patch.setattr(Pages, "holder_gone", lambda _pages, _holder: 0)


# bug -> the rules by which it may be found
PLANTS: dict[Plant, set[Rule]] = {
    lost_release: {Rule.PAGES},
    duplicated_token: {Rule.TOKENS},
    endless_lease: {Rule.CLEAN_END, Rule.PROGRESS, Rule.PATIENCE},
}


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield
