"""Routers in the states that the tests need, and the messages that they send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from alignedserve.core import Role
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import AtWork, TimerFired
from alignedserve.protocol.messages import (
    AttemptLost,
    Cancel,
    Figures,
    Heartbeat,
    Inquire,
    Members,
    Message,
    Prefill,
    Submit,
)
from alignedserve.router.members import RECOVERY_S
from alignedserve.router.state import RouterCore, RouterLimits
from tests.samples import ROUTER_MEMBER, member, request, said

M = TypeVar("M")
LIMITS = RouterLimits(most_open=3, heartbeat_s=0.5, death_s=3.0)
GATHERED_AT = 1.0
RECOVERED_AT = GATHERED_AT + RECOVERY_S
NAMES = ("gateway-0", "pool-0", "prefill-0", "prefill-1", "decode-0")
HOLDERS = ("prefill-0", "prefill-1", "pool-0", "decode-0")
A, B = request("a"), request("b")
REBUILT = Send("gateway-0", Figures(rebuilt_s=RECOVERED_AT, member="router"))


def beat(name: str, incarnation: int = 1) -> Message:
    return Heartbeat(member(name, incarnation))


def recovering(
    names: Sequence[str] = NAMES, limits: RouterLimits = LIMITS, at_work: AtWork | None = None
) -> RouterCore:
    """Return a router that has gathered these members, and asks each which requests it holds."""
    router = RouterCore(ROUTER_MEMBER, limits, 0.0, at_work)
    for name in names:
        assert router.handle(said(name, beat(name)), 0.1) == []
    router.handle(TimerFired("gathered"), GATHERED_AT)
    return router


def serving(names: Sequence[str] = NAMES, limits: RouterLimits = LIMITS, at_work: AtWork | None = None) -> RouterCore:
    router = recovering(names, limits, at_work)
    assert router.handle(TimerFired("recovered"), RECOVERED_AT) == ([REBUILT] if "gateway-0" in names else [])
    return router


def look(router: RouterCore, first: float, last: float) -> list[Command]:
    """Have the router look for silent members each heartbeat, and return what it does at the last look."""
    commands, at = list[Command](), first
    while at <= last:
        commands, at = router.handle(TimerFired("liveness"), at), at + LIMITS.heartbeat_s
    return commands


def cancels(name: str, attempt: int = 0, at: Sequence[str] = HOLDERS) -> list[Command]:
    return [Send(holder, Cancel(name, attempt)) for holder in at]


KNOWN = {  # in the order in which members are named
    Role.GATEWAY: (Role.POOL, Role.PREFILL, Role.DECODE, Role.GATEWAY),
    Role.POOL: (Role.PREFILL, Role.DECODE),
    Role.PREFILL: (Role.POOL, Role.GATEWAY),
    Role.DECODE: (Role.POOL, Role.GATEWAY),
}


def roll(to: str, *there: tuple[str, int]) -> Members:
    """Return the roll that the member hears when these are there: the members that it works with, and itself."""
    members = [member(*name) for name in there]
    known = [
        member for role in KNOWN[member(to).role] for member in members if member.role is role and member.name != to
    ]
    return Members((ROUTER_MEMBER, *known, *(member for member in members if member.name == to)))


def announcement(*there: tuple[str, int], to: Sequence[str] | None = None) -> list[Command]:
    names = [name for name, _ in there] if to is None else to
    return [Send(name, roll(name, *there)) for name in names]


def inquiry(holder: str, *names: str, attempt: int = 0) -> Command:
    return Send(holder, Inquire(tuple((name, attempt) for name in names)))


def lost_to_owner(
    name: str, attempt: int = 0, *, died: bool = False, alone: bool = False, silent: bool = False
) -> Command:
    return Send("gateway-0", AttemptLost(name, attempt, died, alone, silent))


def sent(commands: Sequence[Command], kind: type[M]) -> list[tuple[str, M]]:
    """Return the messages of this kind, each with who gets it."""
    sends = [command for command in commands if isinstance(command, Send)]
    return [(send.to, send.message) for send in sends if isinstance(send.message, kind)]


def placed(commands: Sequence[Command]) -> list[tuple[str, str]]:
    """Return which workers got which requests."""
    return [(worker, prompt.request.id) for worker, prompt in sent(commands, Prefill)]


def submit(router: RouterCore, *names: str, now: float = 3.0) -> None:
    for name in names:
        router.handle(said("gateway-0", Submit(request(name))), now)
