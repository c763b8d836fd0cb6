"""Requests and members for the tests of the cores, with defaults for everything that a test does not name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from alignedserve.core import Due, Entry, Request, Role, Sampling, ServiceClass, Slo, WorkerLimits
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, Received
from alignedserve.protocol.form_orders import CopySlots
from alignedserve.protocol.messages import ROUTER, Figures, Member, Message, Report

STOP = 0

LIMITS = WorkerLimits(num_blocks=8, block_size=4, page_size=8, max_step_tokens=8, max_batch=2)


def request(
    name: str = "r", prompt: int = 3, max_tokens: int = 5, attempt: int = 0, owner: str = "gateway-0"
) -> Request:
    """Return a request whose prompt is 1, 2, 3, ..."""
    return Request(
        id=name,
        owner=owner,
        attempt=attempt,
        prompt=tuple(range(1, prompt + 1)),
        emitted=(),
        sampling=Sampling(),
        max_tokens=max_tokens,
        stop_tokens=(STOP,),
        service=ServiceClass.RT,
        slo=Slo(),
        arrival_at=0.0,
    )


def next_attempt(of: Request, emitted: Sequence[int] = ()) -> Request:
    """Return the request's next attempt, with emitted tokens that came at 0.0."""
    return replace(of, attempt=of.attempt + 1, emitted=tuple(emitted), emitted_at=0.0 if emitted else of.emitted_at)


def entry(of: Request, pages: Sequence[int], output: Sequence[int] = (7,)) -> Entry:
    """Return the entry that a prefill worker commits for a request whose first token came at 0.0."""
    return Entry(of, tuple(output), tuple(pages), Due(of.slo.tbt_s))


def member(name: str, incarnation: int = 1) -> Member:
    """Return a member, whose role is the first part of its name."""
    role = Role(name.partition("-")[0])
    return Member(name, role, "local", incarnation, f"{name}#{incarnation}")


def said(sender: str, message: Message, incarnation: int = 1) -> Event:
    return Received(sender, message, incarnation)


ROUTER_MEMBER, POOL_MEMBER, GATEWAY_MEMBER = member(ROUTER), member("pool-0"), member("gateway-0")


def but_reports(commands: Iterable[Command]) -> list[Command]:
    """Drop workers' reports and counts, which only repeat what other commands say."""
    return [command for command in commands if not (isinstance(command, Send) and _is_report(command.message))]


def _is_report(message: Message) -> bool:
    return isinstance(message, Report) or (isinstance(message, Figures) and message.worker is not None)


def slot_copies(order: CopySlots) -> Counter[str]:
    """Return how many tokens the order takes from slots, brings back to slots, and moves."""
    counts = {"checkpoint": order.checkpoints, "restored": order.restores, "moved": order.moves}
    return Counter({what: len(copies) for what, copies in counts.items() if copies})
