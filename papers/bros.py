"""BROS (§4.2): chats take the time, the seats and the memory of documents, and go by the slack of all their work.

The default's rules are BROS's, with chats by the slack that all of their work leaves (§4.1), where the default looks at
the next token. The order is in rules.py.
"""

from __future__ import annotations

from alignedserve.schedulers.aligned import Aligned
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.scheduler import NO_LIMIT


class Bros(Aligned):
    """Algorithm 1: "meet the latency SLOs of each RT request while maximizing the throughput of BE requests" (§4)."""

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self.makes_pauses = False  # these are ours: its steps run whole
