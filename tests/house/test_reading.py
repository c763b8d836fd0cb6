"""The page docs/reading.md leads through the code: every name on its way exists."""

from __future__ import annotations

import ast

from measure_house import HERE, definition, stops


def test_what_is_to_be_read_is_there() -> None:
    found = list(stops(HERE))
    assert len(found) > 15
    for stop in found:
        tree = ast.parse(stop.path.read_text(encoding="utf-8")) if stop.path.suffix == ".py" else ast.Module([], [])
        assert [name for name in stop.names if definition(tree, name) is None] == [], stop.path
        assert stop.has_all or stop.names or stop.has_docstring, stop.path
