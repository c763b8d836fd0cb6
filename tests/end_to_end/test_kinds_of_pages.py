"""Tests over HTTP of the kinds of pages in the pool: int8 changes hardly any token."""

from __future__ import annotations

import asyncio

from tests.end_to_end.client import all_tokens, is_greedy, mixed
from tests.end_to_end.deployment import deployed
from tests.rare import rare

REQUESTS = 8


@rare  # tests/engine/test_int8_pages.py has them without servers
def test_with_int8_most_answers_are_those_without() -> None:
    """Few requests decode at once, so that most wait, and their full pages are compressed."""
    wanted = mixed(REQUESTS, seed=12, prompts=(64, 300), outputs=(8, 40))
    with deployed("--pool-compression", "int8", "--max-num-seqs", "2", topology="1+1") as deployment:
        answers = asyncio.run(all_tokens(deployment.url, wanted))
    assert all(answers)
    assert sum(map(is_greedy, wanted, answers)) >= 0.8 * REQUESTS
