"""What requests have used of workers' time and energy, as workers tell their owner: also once a client has left.

A request that ends early is in a step then, and its worker tells of that step when it has ended. So the accounts of the
last MOST_SETTLING such requests stay open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.core import NOTHING_SPENT, Spent
from alignedserve.protocol.commands import Charge, Command

MOST_SETTLING = 1024


@dataclass(slots=True)
class Account:
    spent: Spent = NOTHING_SPENT  # in all attempts
    _before: Spent = NOTHING_SPENT  # in the attempts before the newest that a worker told of
    _newest: int = 0

    def note(self, attempt: int, spent: Spent) -> None:
        """Note what this attempt has spent so far. A smaller value than the one known is old: a worker that handed the
        request on may tell late."""
        if attempt > self._newest:
            self._before, self._newest = self.spent, attempt
        so_far = self._before.plus(spent)
        if attempt == self._newest and so_far.seconds > self.spent.seconds:
            self.spent = so_far


class SettlingAccounts:
    """The accounts of requests that ended before their last token came."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def end(self, request: str, account: Account) -> list[Command]:
        """Charge what a request has used until its early end, and keep its account for what workers still tell."""
        self._accounts[request] = account
        if len(self._accounts) > MOST_SETTLING:
            del self._accounts[next(iter(self._accounts))]
        return [Charge(request, account.spent)] if account.spent.seconds else []

    def note(self, request: str, attempt: int, spent: Spent) -> Iterable[Command]:
        account = self._accounts.get(request)
        if account is None:
            return ()
        account.note(attempt, spent)
        return (Charge(request, account.spent),)
