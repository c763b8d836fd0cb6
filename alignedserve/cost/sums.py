"""`added(values)`: numbers, added one after the other.

Since Python 3.12 `sum` of floats carries along what rounding loses, so its last digits depend on the version. Whatever
decides something, or is to be the same everywhere, adds with this.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add


def added(values: Iterable[float]) -> float:
    return reduce(add, values, 0.0)
