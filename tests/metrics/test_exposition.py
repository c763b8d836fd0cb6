"""Blocks of Prometheus' text form, and how they merge."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from alignedserve.core import ServiceClass
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.metrics.series import block, label, line, merge, split
from tests.exposition import value


def test_owners_are_merged_family_by_family() -> None:
    owners = [RequestMetrics("demo", part=f"gateway-{number}") for number in range(2)]
    for number, owner in enumerate(owners):
        owner.rejected.of("queue_full", "rt").inc()
        owner.of[ServiceClass.RT].ttft.observe(number)
    texts = ["".join(owner.blocks()) for owner in owners]
    shown = merge(block for text in texts for block in split(text))
    families = {family.name: family for family in text_string_to_metric_families(shown)}
    parts = [sample.labels["part"] for sample in families["alignedserve:admission_rejections"].samples]
    assert parts == ["gateway-0", "gateway-1"]
    assert value(shown, 'alignedserve:time_to_first_token_seconds_sum{class="rt",part="gateway-1"}') == 1
    assert shown.count("# TYPE alignedserve:time_to_first_token_seconds histogram") == 1


def test_a_text_is_split_where_families_begin_whatever_labels_say() -> None:
    strange = 'a "# HELP" \\ \n# HELP b'
    blocks = [
        block("one", "gauge", "About.", [line("one", label("of", strange), 1)]),
        block("two", "gauge", "Two.", []),
    ]
    assert split("".join(blocks)) == blocks
    assert value(merge(split("".join(blocks))), "one") == 1
