"""Another key's chats beside each flood of a hostile key; what floods cost is measured (lab/benchmarks/hostile.py).

None is refused, lost or broken, and no part ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from alignedserve.lab.bench.wording import WordWording
from alignedserve.lab.benchmarks.common.serving import parts_under, played
from alignedserve.lab.benchmarks.hostile import FLOODS, LOADS, flooding
from alignedserve.lab.loads.figures.request_figures import finished
from tests.end_to_end.conftest import Keys, make_keys
from tests.end_to_end.deployment import Deployment, deployed
from tests.rare import rare

CHATS = "sizes:prompt=1,output=8,rate=4,cv=0,num_requests=12"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"), "flood", "chats")


@pytest.fixture(scope="module")
def deployment(keys: Keys) -> Iterator[Deployment]:
    with deployed("--keys-file", str(keys[0]), "--served-model-name", "measured") as found:
        yield found


@rare
@pytest.mark.parametrize("flood", [*FLOODS, *LOADS])
def test_another_keys_chats_are_served(deployment: Deployment, keys: Keys, flood: str) -> None:
    parts = parts_under(deployment.process.pid)
    with flooding(flood, deployment.url, keys[1]["flood"]):
        chats = played(deployment.url, CHATS, WordWording(Random()), api_key=keys[1]["chats"])
    assert len(finished(chats.requests)) == len(chats.requests) == 12
    assert parts_under(deployment.process.pid).keys() >= parts.keys()
