"""`added(values)` adds numbers one after the other.

Since Python 3.12 `sum` of floats compensates for rounding, so its last digits depend on the version. Code that decides
something, or that must give the same result everywhere, adds with this function.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add


def added(values: Iterable[float]) -> float:
    return reduce(add, values, 0.0)
