"""Tests that a deployment which lacks something serves without it, and says so wherever its operator looks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.end_to_end.client import all_tokens, check_greedy, mixed
from tests.end_to_end.deployment import BACK_S, Deployment, deployed, wait_until
from tests.end_to_end.test_status import status

_WITHOUT = """
import sys
from pathlib import Path
from alignedserve.kernels import library

sys.modules["uvloop"] = None  # its import fails
loaded = library._loaded
library._loaded = lambda path: loaded(Path("/nowhere", path.name))
"""


@pytest.fixture(scope="module")
def lacking() -> Iterator[Deployment]:
    with deployed(plant=_WITHOUT) as deployment:
        yield deployment


def test_it_serves_and_says_what_it_does_otherwise(lacking: Deployment) -> None:
    wanted = {("gateway-0", "uvloop"), ("decode-0", "C++ kernels")}

    def told() -> set[tuple[str, str]]:
        return {(fallback["part"], fallback["what"]) for fallback in lacking.ask("/health").json()["fallbacks"]}

    asked = mixed(4, seed=3, outputs=(1, 40))
    check_greedy(asked, asyncio.run(all_tokens(lacking.url, asked)))
    wait_until(lambda: told() == wanted, BACK_S, lacking.log)
    said = status("--url", lacking.url).stdout
    assert "gateway-0: uvloop: asyncio's own event loop runs, which is slower (it cannot be imported: " in said
    assert "decode-0: C++ kernels: torch reference takes their place (" in said
    assert lacking.metric("fallbacks") == 3, "the job runner's event loop too"
    for part in ("gateway-0: uvloop", "decode-0: C++ kernels"):
        assert f"WARNING {part}: " in lacking.whole_log()
