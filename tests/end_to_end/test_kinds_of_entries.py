"""Tests over HTTP of the kinds of entries in the pool: hidden vectors change no token, int8 hardly any."""

from __future__ import annotations

import asyncio

from tests.end_to_end.client import all_tokens, check_greedy, is_greedy, mixed
from tests.end_to_end.deployment import deployed

REQUESTS = 32


def test_hidden_entries_equal_transformers() -> None:
    wanted = mixed(REQUESTS, seed=11)
    with deployed("--set", "kvpool.entries=hidden", topology="1+1") as deployment:
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))


def test_with_int8_most_answers_are_those_without() -> None:
    """Few requests decode at once, so that most wait, and their full pages are compressed."""
    wanted = mixed(REQUESTS, seed=12, prompts=(64, 400), outputs=(8, 60))
    with deployed("--pool-compression", "int8", "--max-num-seqs", "2", topology="1+1") as deployment:
        answers = asyncio.run(all_tokens(deployment.url, wanted))
    assert all(answers)
    assert sum(map(is_greedy, wanted, answers)) >= 0.8 * REQUESTS
