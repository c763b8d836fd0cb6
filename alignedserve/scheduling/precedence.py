"""The precedence between real-time and best-effort requests where a step is chosen and memory is given."""

from __future__ import annotations

from alignedserve.core import Slo


class Precedence:
    """The precedence between real-time and best-effort requests where a step is chosen; here they are equal."""

    lines: tuple[bool | None, ...] = (None,)  # of waiting prompts: of both classes, or each of one (True: real-time)

    def may_displace(self, is_rt: bool) -> bool:
        """Return whether a request of this class may take the seat and the memory of best-effort requests."""
        return False

    def may_replace(self, is_rt: bool) -> bool:
        """Return whether a decode of this class may take the place in a step of a real-time decode that has slack."""
        return False

    def holds_up_all(self, is_rt: bool) -> bool:
        """Return whether a request of this class that waits for memory holds up requests of both classes."""
        return True

    def worth_s(self, pending_s: float) -> float:
        """Return what it is worth to serve a best-effort request that has been pending for so long."""
        return pending_s


class RealTimeFirst(Precedence):
    """Best-effort requests run in what real-time ones leave, and give their memory up for them (BROS §4.2)."""

    lines = (True, False)  # best-effort prompts that find no memory hold up no real-time one

    def may_displace(self, is_rt: bool) -> bool:
        return is_rt

    def may_replace(self, is_rt: bool) -> bool:
        return not is_rt

    def holds_up_all(self, is_rt: bool) -> bool:
        return is_rt

    def worth_s(self, pending_s: float) -> float:
        return min(pending_s, Slo().tbt_s)
