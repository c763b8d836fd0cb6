"""Tests of the figures of a load test, and of what is written of it."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from math import isnan, nan
from pathlib import Path
from xml.etree import ElementTree

import pytest

import reference_pages
from alignedserve.core import ServiceClass
from alignedserve.errors import AlignedServeError
from alignedserve.lab.bench import report
from alignedserve.lab.bench.page import charts, page
from alignedserve.lab.bench.report import ROWS, ErrorCount, LoadFigures, MeasuredRun, joined
from alignedserve.lab.loads.records.records import RequestOutcome
from tests.simulator.runs import MIXED, be, record, rt

RUN = MeasuredRun("http://x/v1", "m", "chat,rate=2", 3, MIXED, (ErrorCount("429", 1, "too <many>"),), 0.25)
DOCS = Path(__file__).parents[2] / "docs"


def test_what_counts_as_kept_is_what_counts_everywhere() -> None:
    """Of the four RT requests only "quick" attains, of the three BE requests only "soon" (tests/simulator/runs.py)."""
    found = LoadFigures.from_record(MIXED)
    chats, papers = (found.classes[service] for service in ServiceClass)
    assert (chats["attainment"], papers["attainment"]) == (1 / 4, 1 / 3)
    assert (chats["goodput"], papers["goodput"]) == (1 / 10, 1 / 10)
    assert found.goodput == 2 / 10
    assert chats["tokens_in_time"] == 6 / 9
    assert isnan(papers["tokens_in_time"])
    assert chats["ttft_s.mean"] == pytest.approx((0.3 + 1.5 + 0.5) / 3)
    assert chats["tpot_s.mean"] == pytest.approx((0.1 + 0.1 + 0.3) / 3)
    assert found.tokens_per_s == pytest.approx(1.4)


def test_lines_of_a_batch_job_have_no_times_of_tokens() -> None:
    lines = [replace(be("l", 0.0, 4.0, 4.0), job="b"), be("r", 0.0, 1.0, 2.0)]
    found = LoadFigures.from_record(record(lines)).classes[ServiceClass.BE]
    assert (found["requests.finished"], found["end_to_end_s.mean"]) == (2, (4.0 + 2.0) / 2)
    assert (found["ttft_s.mean"], found["gap_s.mean"]) == (1.0, 1.0), "of the other request alone"


def test_rounds_are_joined_one_after_the_other() -> None:
    late = replace(record([rt("b", 100.0, 100.5, 101.0)]), began_at=100.0, ended_at=101.0, notes=("n",))
    whole = joined([record([rt("a", 0.0, 0.5)]), late, late])
    assert [request.arrival_at for request in whole.requests] == [0.0, 10.0, 11.0]
    assert [list(request.token_at) for request in whole.requests][1] == [10.5, 11.0]
    assert (whole.duration_s, whole.notes) == (12.0, ("n",))


def test_the_table_says_what_went_wrong() -> None:
    shown = report.text([replace(RUN, record=replace(MIXED, notes=("a note",)))])
    assert shown.startswith("m at http://x/v1: chat,rate=2, seed 3: 10.0 s, 1 tokens/s, goodput 0.2/s, 25 % of prompts")
    assert "Errors\n  429 (1 times): too <many>" in shown
    assert "Notes\n  a note" in shown
    assert "nan" not in shown


def test_a_run_is_read_again_with_all_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(report.document([RUN, replace(RUN, cached=nan)]))
    first, second = report.read(path)
    assert first.figures == RUN.figures
    assert replace(first, record=RUN.record) == RUN
    assert isnan(second.cached)
    assert report.text([first]) == report.text([RUN])


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"format": 1, "runs": [{}]}', '{"format": 9}'])
def test_another_file_is_no_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(AlignedServeError, match=r"other\.json (was not written by bench --json|is of another version)"):
        report.read(path)
    with pytest.raises(AlignedServeError, match="cannot be read"):
        report.read(tmp_path / "none")


def test_the_json_has_every_figure() -> None:
    (run,) = json.loads(report.document([RUN]))["runs"]
    assert run["classes"]["rt"]["attainment"] == 0.25
    assert run["classes"]["be"].keys() == {row.path for row in ROWS}
    assert run["classes"]["be"]["tokens_in_time"] is None


def test_the_csv_has_a_row_for_each_request() -> None:
    found = list(csv.DictReader(StringIO(report.requests_csv([RUN, RUN]))))
    assert len(found) == 2 * len(MIXED.requests)
    assert found[0]["url"] == "http://x/v1"
    assert {row["outcome"] for row in found} == {"finished", "refused", "open"}


class _Tags(HTMLParser):
    """Collects what a page would load from elsewhere, and its open tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]


def test_a_page_compares_runs_and_needs_nothing_else() -> None:
    text = page([RUN, replace(RUN, model="<other>")])
    tags = _Tags()
    tags.feed(text)
    assert (tags.loads, tags.count["svg"], tags.count["table"]) == ([], 6, 1)
    assert "&lt;other&gt;" in text
    assert "<other>" not in text
    assert "too &lt;many&gt;" in text
    assert text.count(">A RT<") == 6 + 1, "in the legend of every picture, and in the table"


def test_pictures_hold_curves_within_their_frames() -> None:
    for chart in charts([RUN, RUN]):
        tree = ElementTree.fromstring(chart.svg())
        width, height = float(tree.attrib["width"]), float(tree.attrib["height"])
        lines = [line.attrib["points"] for line in tree.iter("{http://www.w3.org/2000/svg}polyline")]
        assert len(lines) == len(chart.curves) > 0, chart.title
        for x, y in (point.split(",") for line in lines for point in line.split()):
            assert 0 <= float(x) <= width, chart.title
            assert 0 <= float(y) <= height, chart.title


def test_a_run_in_which_nothing_came_is_drawn_too() -> None:
    refused = record([rt("a", 0.0, outcome=RequestOutcome.REFUSED)])
    assert "<svg" in page([replace(RUN, record=refused)])
    assert report.text([replace(RUN, record=refused)])


def test_every_figure_is_defined_in_the_docs() -> None:
    text = f"{(DOCS / 'guides' / 'measure.md').read_text(encoding='utf-8')}\n{reference_pages.section('figures')}"
    labels = {re.sub(" (mean|p50|p95|p99)$", "", row.label) for row in ROWS}
    assert sorted(label for label in labels if f"| {label} |" not in text and f"*{label}*" not in text) == []
