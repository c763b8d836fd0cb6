"""What one caller asks for takes no more of another than its part: whatever promises it has, and however it sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.lab.benchmarks.common.simulating import record_of, save_load
from alignedserve.lab.loads.figures.request_figures import attains
from alignedserve.lab.loads.records.records import RequestRecord
from alignedserve.lab.reports.trial import SimulationTrial
from tests.conftest import examples
from tests.rare import rare

ANN: list[dict[str, Any]] = [
    {"name": "documents", "service": "be", "prompt": "512-1024", "output": "32-128", "arrivals": "closed"}
    | {"in_flight": 16, "num_requests": 100_000, "caller": "ann"},
    {"name": "chats", "rate": 1.0, "prompt": "400-800", "output": "50-100", "num_requests": 100_000, "caller": "ann"},
]
SECONDS, GPU = 12, "rtx4090-llama-3.1-8b-tp1"
PART = 0.5
LEFT_BY_SHORT = 0.25  # of documents, by prompts of a few tokens
ENDLESS = {"arrivals": "closed", "num_requests": 100_000}

milliseconds = st.sampled_from((1, 3, 10, 15, 18, 20, 25, 30, 50, 100, 1000))
SHORT_PROMPTS = ("1-4", "20-30")
lengths = st.sampled_from((*SHORT_PROMPTS, "400-600", "3000-4000"))
streams = st.fixed_dictionaries(
    {
        "prompt": lengths,
        "output": st.sampled_from(("1-2", "20-40", "900-1000")),
        "ttft_s": milliseconds.map(lambda number: number / 100),
        "tbt_s": milliseconds.map(lambda number: number / 1000),
        "in_flight": st.integers(1, 6),
        "service": st.sampled_from(("rt", "be")),
    }
)


def served(folder: Path, *others: dict[str, Any]) -> tuple[float, float]:
    """Return the tokens a second of ann's documents, and the share of ann's chats that are in time."""
    names = [{**other, "name": f"other{at}", "caller": "bob"} for at, other in enumerate(others)]
    load = save_load(folder / "load.yaml", SECONDS, *ANN, *names)
    record = record_of(SimulationTrial("aligned", load, "colocated", 0, None, GPU))
    of_ann: dict[str, list[RequestRecord]] = {"documents": [], "chats": []}
    for request in record.requests:
        of_ann.get(request.id.partition("-")[0], []).append(request)
    tokens = sum(at <= SECONDS for request in of_ann["documents"] for at in request.token_at)
    return tokens / SECONDS, sum(map(attains, of_ann["chats"])) / len(of_ann["chats"])


STREAM = {"prompt": "20-30", "output": "900-1000", "ttft_s": 1.0, "tbt_s": 0.02}
SHORT = {"prompt": "1-4", "output": "1-2", "ttft_s": 0.03, "tbt_s": 0.02}


@rare  # a second for each
@pytest.mark.parametrize(
    ("other", "least"), [(STREAM, 0.8), (SHORT, LEFT_BY_SHORT)], ids=["a stream", "one short chat"]
)
def test_a_tight_promise_leaves_others_documents_a_part(tmp_path: Path, other: dict[str, Any], least: float) -> None:
    """A decode takes 17 ms. Each of these took all documents, and the stream 32 of 35 chats. Short chats' prompts run
    in steps of their own, besides their part of others."""
    documents, chats = served(tmp_path)
    beside, chats_beside = served(tmp_path, {**other, **ENDLESS, "in_flight": 1})
    assert beside >= least * documents
    assert chats_beside >= chats - 0.05


@rare  # a second for each example
@given(st.lists(streams, min_size=1, max_size=2))
@settings(max_examples=examples(6), deadline=None)
def test_no_promises_take_more_than_a_part_of_chats_and_documents(
    tmp_path_factory: pytest.TempPathFactory, others: list[dict[str, Any]]
) -> None:
    """Documents keep a part where the others' prompts are short (of 60 draws one kept 0.40, the others 0.60 to 0.98).
    Beside documents of 3,000 tokens with outputs of 2 they keep 0.40, beside such prompts of chats, which go before all
    documents, 0.02 to 0.41: more than bob's part."""
    folder = tmp_path_factory.mktemp("callers")
    documents_alone, chats_alone = served(folder)
    documents, chats = served(folder, *({**other, **ENDLESS} for other in others))
    assert chats >= chats_alone - PART
    if all(other["prompt"] in SHORT_PROMPTS for other in others):
        assert documents >= LEFT_BY_SHORT * documents_alone
