"""Copies and transfers that went wrong on a worker, as it counts them for the router."""

from __future__ import annotations

from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import ROUTER, Figures


class Faults:
    def __init__(self) -> None:
        self.num_refused = 0  # copies from the pool that were not intact
        self.num_failed_transfers = 0  # of KV from device to device

    def count_refused(self) -> Command:
        """Count a copy from the pool that failed its check, and tell the router."""
        self.num_refused += 1
        return self._figures

    def count_failed_transfer(self) -> Command:
        """Count a transfer that failed, and tell the router."""
        self.num_failed_transfers += 1
        return self._figures

    @property
    def _figures(self) -> Command:
        """Both numbers each time: the router goes by the last message."""
        return Send(ROUTER, Figures(num_refused=self.num_refused, num_failed_transfers=self.num_failed_transfers))
