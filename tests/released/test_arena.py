"""A worker and a pool of two versions share an arena, or the worker refuses it."""

from __future__ import annotations

import zlib
from base64 import b64decode
from contextlib import closing
from pathlib import Path

import pytest

from alignedserve.errors import ArenaError
from alignedserve.kvpool.arena.arena import Arena
from tests.released.write import ARENA, CONTENTS, PAGE

TO_DO = "today's code misreads an arena of the last released version: raise _VERSION in kvpool/arena/arena.py"


def test_pages_that_it_wrote_are_read_or_the_arena_is_refused(tmp_path: Path) -> None:
    path, found = tmp_path / "arena", bytearray()
    path.write_bytes(zlib.decompress(b64decode(ARENA.read_text())))
    path.chmod(0o600)
    try:
        arena = Arena.attach(path)
    except ArenaError as error:
        if "restart the pool" not in str(error):
            pytest.fail(f"{error}: {TO_DO}")
        return
    with closing(arena):
        assert arena.read(1, CONTENTS, lambda page: found.extend(page)), TO_DO
        assert found.startswith(PAGE), TO_DO
