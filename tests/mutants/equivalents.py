"""Drawn mutants that were shown to behave as the source does, each with the reason; they do not count.

The keys are those of operators.key: file, function, operator, code.
"""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
