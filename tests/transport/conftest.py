from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.transport.nodes import Node, meet

MakeNode = Callable[..., Node]


@pytest.fixture(scope="module", params=["collective", "ipc"])
def shared(request: pytest.FixtureRequest) -> Iterator[Path | None]:
    """Yield the folder where device caches are files that other workers map; None where KV is sent."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory) if request.param == "ipc" else None


@pytest.fixture
def node_of(shared: Path | None) -> Iterator[MakeNode]:
    """Return a function that makes workers, which end with the test."""
    with ExitStack() as nodes:

        def make(name: str, **kwargs: Any) -> Node:
            given: dict[str, Any] = {"shared": shared, **kwargs}
            node = Node(name, **given)
            nodes.callback(node.transport.close)
            return node

        yield make


@pytest.fixture
def both(node_of: MakeNode) -> tuple[Node, Node]:
    """Return a prefill and a decode worker that know each other."""
    pair = node_of("prefill-0"), node_of("decode-0")
    meet(*pair)
    return pair
