"""What each peer may say: its role decides, and what else it says is dropped.

A part that has gone mad, or a process that has stolen the keys of the parts, can so declare no death, name no members
and speak for no other role.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

from alignedserve.core import Role
from alignedserve.forms.messages import FORM_SPEECH
from alignedserve.protocol.messages import (
    Acknowledge,
    Acquit,
    AskBatch,
    AskDecisions,
    AskPages,
    AskPrefix,
    AttemptLost,
    Batch,
    Cancel,
    Commit,
    Decisions,
    Declare,
    Decline,
    Died,
    Expect,
    Figures,
    GiveBack,
    Heartbeat,
    Holding,
    Infeasible,
    Inquire,
    Keep,
    Kept,
    LeasePages,
    Members,
    Missed,
    Offer,
    Prefill,
    Prefix,
    Progress,
    Pull,
    Refused,
    Release,
    Report,
    Resend,
    Reserve,
    Retire,
    Spoiled,
    Started,
    StepLate,
    Submit,
    Tokens,
    Used,
)

log = logging.getLogger("alignedserve.links")

_OWNER = (Heartbeat, Submit, Cancel, Acquit, Declare, Inquire, Resend, Acknowledge, Missed)
_HOLDER = (Heartbeat, Progress, Holding, Figures, Missed)
_WORKER = (*_HOLDER, Tokens, Used, AskPages, AskPrefix, Spoiled, Commit, Release, Offer, Pull, Decisions)
_OF_ROUTER = (
    *(Members, Refused, Infeasible, AttemptLost, Prefill, Expect, Cancel, Inquire, Retire, Figures, Missed),
    Decisions,
    Reserve,
    StepLate,
)

_BY_LAUNCHER = frozenset[type]({Started, Died, Retire})
_BY_ROLE: Mapping[Role, frozenset[type]] = MappingProxyType(
    {
        Role.ROUTER: frozenset(_OF_ROUTER),
        Role.GATEWAY: frozenset((*_OWNER, AskDecisions)),
        Role.JOBS: frozenset(_OWNER),
        Role.POOL: frozenset((*_HOLDER, LeasePages, GiveBack, Prefix, Batch, Kept, Expect, Inquire, Cancel)),
        Role.PREFILL: frozenset((*_WORKER, Expect, Keep)),
        Role.DECODE: frozenset((*_WORKER, Report, Cancel, Decline, AskBatch, Keep)),
    }
)


def may_say(role: Role | None, kind: type) -> bool:
    """Return whether a member of this role may send messages of this kind; None is the launcher."""
    return kind in _BY_LAUNCHER if role is None else kind in _BY_ROLE[role] or kind in FORM_SPEECH.get(role, ())


class Refusals:
    """What was dropped because its sender may not say it: counted, with one line in the log for each sender."""

    _MOST_LINES = 20  # a stranger may use many names

    def __init__(self, me: str) -> None:
        self._me = me
        self._senders: set[str] = set()
        self.count = 0

    def note(self, sender: str, message: object) -> None:
        self.count += 1
        if sender not in self._senders and len(self._senders) < self._MOST_LINES:
            self._senders.add(sender)
            # without the content, which may be a prompt
            log.warning("%s drops what %.60r may not say: %s", self._me, sender, type(message).__name__)
