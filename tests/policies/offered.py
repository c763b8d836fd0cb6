"""A policy as a package offers it."""

from __future__ import annotations

from alignedserve.policies import OrderPolicy, RequestInLine


class Newest(OrderPolicy):
    def key(self, request: RequestInLine) -> float:
        return -request.arrival_at
