"""The table of what each peer may say."""

from __future__ import annotations

from typing import get_args

from alignedserve.core import Role
from alignedserve.protocol.membership import may_say
from alignedserve.protocol.messages import Died, Message, Retire, Started

KINDS: tuple[type, ...] = get_args(Message)


def test_every_message_has_a_sender() -> None:
    assert [kind.__name__ for kind in KINDS if not any(may_say(role, kind) for role in (None, *Role))] == []


def test_only_the_launcher_says_who_started_and_who_died() -> None:
    assert {kind for kind in KINDS if may_say(None, kind)} == {Started, Died, Retire}
    assert [role for role in Role if may_say(role, Died) or may_say(role, Started)] == []
