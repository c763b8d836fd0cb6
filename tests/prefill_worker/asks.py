"""What a prefill worker and its pool say to each other of pages."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import AskPages, LeasePages


def spare(pages: int, number: int, kept: tuple[int, ...] = ()) -> AskPages:
    """Return an ask for pages to have at hand, as many as are free."""
    return AskPages(pages, number, kept, is_spare=True)


def firm(pages: int, number: int, kept: tuple[int, ...] = ()) -> AskPages:
    """Return an ask for pages without which a request cannot leave: all of them are waited for."""
    return AskPages(pages, number, kept)


def leased(pages: tuple[int, ...], number: int) -> LeasePages:
    return LeasePages(pages, number)


def asks(commands: Iterable[Command]) -> list[AskPages]:
    """Return what is asked for among these commands."""
    messages = [command.message for command in commands if isinstance(command, Send)]
    return [message for message in messages if isinstance(message, AskPages)]
