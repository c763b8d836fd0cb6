"""Ratchets: the lines that run on each hot path, which no commit raises by 5 % without saying so.

paths.py           The hot paths: what runs on each.
choices.py         Choices of steps among thousands of waiting prompts.
requests.py        Requests for them.
lives.py           Whole lives of requests, as a router's core hears of them.
counting.py        Counts the lines of the project's Python that run.
counts.json        What each path took when it was last accepted.
test_ratchets.py   Compares.
__main__.py        Accepts what each path takes now: `python -m tests.ratchets` writes counts.json.
"""

import json
from pathlib import Path

ACCEPTED = Path(__file__).with_name("counts.json")
MOST = 1.05  # of the lines that were accepted


def accepted() -> dict[str, float]:
    counts: dict[str, float] = json.loads(ACCEPTED.read_text(encoding="utf-8"))
    return counts
