"""Passwords and keys of settings stand in no line of a log, and no part is given those that it has no use for."""

from __future__ import annotations

import pytest

from alignedserve.config.config import dump, load, parse
from alignedserve.core import OWNERS, Role
from alignedserve.launch.orders import Reloading
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.part import PartSpec

STORE = "redis://:p4ssw0rd@db:6379/0"
GIVEN = {"ALIGNEDSERVE_JOBS_STORE": STORE, "ALIGNEDSERVE_SERVER_API_KEY": "kl1ent"}
CONFIG = load({}, GIVEN, None)


def sent(role: Role) -> str:
    """Return what the process of a part with this role gets; on Ray its database keeps that."""
    at = "local", "test", "127.0.0.1", "tcp://127.0.0.1:9"
    return PartSpec(role, f"{role.value}-0", *at, dump(CONFIG), ClockOrigin.read()).to_json()


@pytest.mark.parametrize("role", Role)
def test_only_parts_that_use_secrets_get_them(role: Role) -> None:
    for secret in ("p4ssw0rd", "kl1ent"):
        assert (secret in sent(role)) is (role in OWNERS)
    given = parse(PartSpec.from_json(sent(role)).config)
    assert given.engine == CONFIG.engine
    assert given.jobs.quota_mb == CONFIG.jobs.quota_mb
    assert given.jobs.store == (STORE if role in OWNERS else "sqlite")


def test_settings_say_nothing_of_them() -> None:
    assert "p4ssw0rd" not in repr(CONFIG)
    assert "kl1ent" not in repr(CONFIG)


def test_a_reload_says_nothing_of_them() -> None:
    other = load({}, GIVEN | {"ALIGNEDSERVE_SERVER_API_KEY": "0ther"}, None)
    _, lines = Reloading(CONFIG, lambda: other).read()
    assert lines == ["server.api_key: new"]
