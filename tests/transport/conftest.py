from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.transport.nodes import Node, meet

MakeNode = Callable[..., Node]


@pytest.fixture
def node_of() -> Iterator[MakeNode]:
    """Workers that end with the test."""
    with ExitStack() as nodes:

        def make(name: str, **kwargs: Any) -> Node:
            node = Node(name, **kwargs)
            nodes.callback(node.transport.close)
            return node

        yield make


@pytest.fixture
def both(node_of: MakeNode) -> tuple[Node, Node]:
    """A prefill and a decode worker that know each other."""
    pair = node_of("prefill-0"), node_of("decode-0")
    meet(*pair)
    return pair
