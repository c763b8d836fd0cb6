"""Choose the workers that `alignedserve scale` starts, and those that it retires."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from alignedserve.config.config import Config
from alignedserve.core import Role
from alignedserve.shell.control import ControlError, LauncherOrder


@dataclass(frozen=True)
class Change:
    new: tuple[str, ...]  # names of workers
    retiring: tuple[str, ...]


def change(workers: Iterable[tuple[Role, str]], leaving: Collection[str], order: LauncherOrder) -> Change:
    """Return the workers to start and to retire, given those that are there and those that leave already. The worker
    that came last is retired first."""
    workers = list(workers)
    new, retiring = list[str](), list[str]()
    for role, count in ((Role.PREFILL, order.prefill), (Role.DECODE, order.decode)):
        named = [name for its_role, name in workers if its_role is role]
        there = [name for name in named if name not in leaving]
        if count is None:
            continue
        retiring += reversed(there[count:])
        free = (f"{role.value}-{number}" for number in itertools.count() if f"{role.value}-{number}" not in named)
        new += itertools.islice(free, max(0, count - len(there)))
    return Change(tuple(new), tuple(retiring))


def check(config: Config, order: LauncherOrder) -> None:
    """Raise ControlError if the deployment cannot have this number of workers."""
    if config.topology.colocated and order.prefill is not None:
        raise ControlError("the deployment is colocated: it has only decode workers, which run the prompts too")
    if order.prefill is not None and order.prefill < 1:
        raise ControlError("without a prefill worker no prompt would run: --prefill is 1 at least")
    if order.decode is not None and order.decode < 1:
        raise ControlError("without a decode worker no request would decode: --decode is 1 at least")
    for name, between, count in (
        ("prefill", config.scale.prefill, order.prefill),
        ("decode", config.scale.decode, order.decode),
    ):
        if between is not None and count is not None and count not in between:
            raise ControlError(
                f"--{name} {count} is not in scale.{name} {between}, which the deployment was started with"
            )
