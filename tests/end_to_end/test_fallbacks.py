"""Tests that a deployment which lacks something serves without it, and says so wherever its operator looks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.client import all_tokens, check_greedy, mixed
from tests.end_to_end.deployment import BACK_S, Deployment, deployed, wait_until
from tests.end_to_end.test_status import status

# Every Python process reads this at its start.
_WITHOUT = """
import sys
from pathlib import Path
sys.modules["uvloop"] = None  # its import fails
import alignedserve.kernels.build
alignedserve.kernels.build.LIBRARY = Path("/nowhere/libalignedserve_kernels.so")
"""


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("without")
    (folder / "sitecustomize.py").write_text(_WITHOUT)
    root = str(Path(__file__).parents[2])
    with deployed("--set", "engine.profile_s=0", environment={"PYTHONPATH": f"{folder}:{root}"}) as deployment:
        yield deployment


def test_it_serves_and_says_what_it_does_otherwise(lacking: Deployment) -> None:
    wanted = {("gateway-0", "uvloop"), ("decode-0", "C++ kernels")}

    def told() -> set[tuple[str, str]]:
        return {(fallback["part"], fallback["what"]) for fallback in lacking.ask("/health").json()["fallbacks"]}

    asked = mixed(4, seed=3)
    check_greedy(asked, asyncio.run(all_tokens(lacking.url, asked)))
    wait_until(lambda: told() == wanted, BACK_S, lacking.log)
    said = status("--url", lacking.url).stdout
    assert "gateway-0: uvloop: asyncio's own event loop runs, which is slower (it cannot be imported: " in said
    assert "decode-0: C++ kernels: torch reference takes their place (" in said
    assert lacking.metric("fallbacks") == 3, "the job runner's event loop too"
    for part in ("gateway-0: uvloop", "decode-0: C++ kernels"):
        assert f"WARNING {part}: " in lacking.whole_log()
