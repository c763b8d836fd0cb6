"""KV from device to device: in order, with time-outs, and an event for each end of each transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from alignedserve.lab.simulator.machines.clock import Agenda
from alignedserve.lab.simulator.machines.transfers import TIMEOUT_S, Mishap, SimulatedTransfers, WrongTransfer
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.events import Event, KvReceived, KvSent

SENDER, RECEIVER = "prefill-0.1", "decode-0.1"


@dataclass
class Device:
    """Model a device whose blocks all hold one text."""

    content: str = ""
    heard: list[Event] = field(default_factory=list)

    def read_kv(self, sends: SendKv) -> object:
        return self.content

    def begin_receiving(self, receives: ReceiveKv) -> None:
        self.content = ""

    def write_kv(self, receives: ReceiveKv, content: object) -> None:
        self.content = str(content)


class Ends:
    def __init__(self, *mishaps: Mishap, late_end_s: float = 0.0) -> None:
        """The first transfers go wrong in these ways, one each."""
        self.agenda, self.gone, left = Agenda(), set[str](), list(mishaps)
        self.source, self.target = Device("kv"), Device()
        self.transfers = SimulatedTransfers(
            self.agenda,
            lambda holder: holder not in self.gone,
            lambda _from, _to: left.pop(0) if left else None,
            late_end_s=late_end_s,
        )
        self.then: dict[Event, Callable[[], None]] = {}  # what the receiver does as soon as it hears an event

    def send(self, number: int, blocks: tuple[int, ...] = (0,)) -> None:
        command = SendKv(number, RECEIVER, blocks, (1, 2) if blocks else ())
        self.transfers.send(SENDER, command, 0.1, self.source, self.source.heard.append)

    def receive(self, number: int) -> None:
        self.transfers.receive(RECEIVER, ReceiveKv(number, SENDER, (3,), (1, 2)), self.target, self._hear)

    def _hear(self, event: Event) -> None:
        self.target.heard.append(event)
        self.then.get(event, lambda: None)()

    def after(self, seconds: float) -> tuple[list[Event], list[Event]]:
        """Run the agenda for some seconds, and return what the sender and the receiver have heard."""
        self.agenda.run(self.agenda.now + seconds)
        return self.source.heard, self.target.heard


def sent(number: int, ok: bool = True) -> Event:
    return KvSent(number, RECEIVER, ok)


def received(number: int, intact: bool = True) -> Event:
    return KvReceived(number, SENDER, intact)


@pytest.mark.parametrize("sender_first", [True, False])
def test_a_transfer_starts_when_both_ends_have_begun(sender_first: bool) -> None:
    ends = Ends()
    begin = [ends.send, ends.receive] if sender_first else [ends.receive, ends.send]
    begin[0](1)
    assert ends.after(1.0) == ([], [])
    begin[1](1)
    assert ends.after(0.2) == ([sent(1)], [received(1)])
    assert ends.target.content == "kv"


def test_transfers_run_in_turn_and_a_passed_over_transfer_gets_nothing() -> None:
    ends = Ends()
    for number in (1, 2, 3):
        ends.receive(number)
    ends.send(2)
    ends.send(3)
    assert ends.after(0.15) == ([sent(2)], [received(1, intact=False), received(2)])
    assert ends.after(0.1) == ([sent(2), sent(3)], [received(1, intact=False), received(2), received(3)])


def test_a_receiver_begins_the_next_transfer_before_the_sender_hears_of_the_last() -> None:
    """The sender heard that the transfer had failed, and kept for seconds what had arrived (fuzz seed 84003148)."""
    ends = Ends()
    ends.then[received(1)] = lambda: ends.receive(2)
    ends.receive(1)
    ends.send(1)
    ends.send(2)
    assert ends.after(0.25) == ([sent(1), sent(2)], [received(1), received(2)])


def test_a_receiver_begins_the_next_transfer_when_it_is_passed_over() -> None:
    """The transfer that passed it over was started twice, and the second time it did not go wrong."""
    ends = Ends(Mishap(ok=False, intact=False, stalls=True))
    ends.then[received(1, intact=False)] = lambda: ends.receive(3)
    ends.receive(1)
    ends.receive(2)
    ends.send(2)
    assert ends.after(1.0) == ([], [received(1, intact=False)])


def test_what_is_not_there_any_more_is_said() -> None:
    ends = Ends()
    ends.receive(1)
    ends.send(1, blocks=())
    assert ends.after(0.2) == ([sent(1)], [received(1, intact=False)])


def test_an_end_that_waits_in_vain_hears_so_in_the_end() -> None:
    ends = Ends()
    ends.receive(1)
    assert ends.after(TIMEOUT_S + 0.1) == ([], [received(1, intact=False)])
    ends.send(1)
    assert ends.after(TIMEOUT_S + 0.1)[0] == [sent(1, ok=False)]


@pytest.mark.parametrize("holder", [SENDER, RECEIVER])
def test_the_death_of_an_end_is_seen_by_the_other_end(holder: str) -> None:
    ends = Ends()
    ends.receive(1)
    ends.send(1)
    ends.gone.add(holder)
    ends.transfers.died(holder)
    assert ends.after(1.0) == ([sent(1, ok=False)], [received(1, intact=False)])
    ends.receive(2) if holder == SENDER else ends.send(2)
    heard = ends.after(0.1)
    assert heard[holder == SENDER][-1] in (sent(2, ok=False), received(2, intact=False)), "at once"


def test_the_two_ends_may_see_it_differently() -> None:
    ends = Ends(Mishap(ok=True, intact=False, stalls=True))
    ends.receive(1)
    ends.send(1)
    assert ends.after(TIMEOUT_S - 0.1) == ([], [])
    assert ends.after(0.2) == ([sent(1)], [received(1, intact=False)])


def test_what_is_changed_while_it_is_sent_is_noticed() -> None:
    ends = Ends()
    ends.receive(1)
    ends.send(1)
    ends.source.content = "another's"
    with pytest.raises(WrongTransfer):
        ends.after(1.0)


def test_a_receiver_may_hear_of_the_end_later_than_the_sender() -> None:
    ends = Ends(late_end_s=0.5)
    ends.receive(1)
    ends.send(1)
    ends.send(2)
    assert ends.after(0.2) == ([sent(1)], [])
    ends.receive(2)
    assert ends.after(0.5) == ([sent(1), sent(2)], [received(1)])
    assert ends.after(0.5) == ([sent(1), sent(2)], [received(1), received(2)])


def test_what_is_sent_after_a_later_transfer_is_sent_in_vain() -> None:
    ends = Ends()
    ends.send(2)
    with pytest.raises(WrongTransfer, match=r"sends transfer 1 to decode-0\.1 after 2"):
        ends.send(1)
