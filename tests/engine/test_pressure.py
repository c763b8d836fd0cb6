"""Tests of greedy equality on a device so small that all events of memory pressure happen.

Each request says what it says alone, and counters say that each event happened. Real cores, engines, pool and arena, in
one
process.

    evicted         a request is recomputed where there is no pool; else it goes to the pool, or to the prefill
                    worker and back, or waits and fetches what the pool has of it
    two in a block   the transport is through the pool (docs/how/papers.md): no request goes to a prefill worker
    hidden          of a model whose hidden vectors are smaller than its K and V: OPT's, and not grouped Llama's
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cost.fit import OnlineCost
from alignedserve.lab.fuzzing.worker_views import num_evictions, num_preemptions, weighed
from alignedserve.scheduling.policy import Handoff, Policy
from tests.engine.deployment import PAGES, Deployment, asked, deployed
from tests.rare import rarely
from tests.reference import Tally, compare
from tests.worker.cores import prefetching_of

PLAIN = Policy(candidate_share=1.0)
BATCHED = replace(PLAIN, handoff=Handoff.POOL)  # the pool searches batches of about one length
HYBRID = replace(PLAIN, memory="hybrid")
SHARED = Policy(memory="two_ended")
LITTLE_KEPT = Policy(memory="two_ended:0.2")
FEW_PAGES = 14  # pages of the pool: some evicted requests find none, and are recomputed, as hidden vectors
FEWER_PAGES = 8  # what has to leave waits on the worker, and fetches what the pool has of it
PREFILL_BLOCKS = 40


class Believed(OnlineCost):
    """A cost model that learns nothing, because real steps take a different time in every run."""

    def __init__(self) -> None:
        super().__init__((), remade_token_s=1e-5)

    def learn(self, shape: object, seconds: float) -> None: ...


def happened(deployment: Deployment) -> set[str]:
    core = deployment.decodes
    aside = prefetching_of(core).num_evicted
    counts: dict[str, int] = {
        **deployment.slot_copies,
        "preemption": num_preemptions(core),
        "eviction to the pool": num_evictions(core) - aside,
        "eviction to candidate requests": aside,
        "batch switch": core.log.counts.num_switches > 1,
        "fetched": core.seats.num_reused_tokens,
        "kept": core.writing.num_kept_pages,
        "written ahead": core.pages.num_ahead,
    }
    if (hybrid := weighed(core.memory)) is not None:
        counts |= {"hidden": hybrid.num_hidden, "projected": hybrid.num_projected}
    return {what for what, count in counts.items() if count}


LEAVING, BATCHES = {"preemption", "eviction to the pool"}, {"batch switch"}
ASIDE, SLOTS = {"eviction to candidate requests"}, {"checkpoint", "restored", "moved"}
KINDS = {"hidden", "projected"}


# The seeds are chosen so that every kind of event happens.
@pytest.mark.parametrize(
    ("topology", "name", "policy", "seed", "pages", "wanted"),
    [
        ("1+1", "gqa-untied", BATCHED, 2, PAGES, LEAVING | ASIDE | BATCHES),
        rarely(("1+1", "gqa-untied", LITTLE_KEPT, 0, PAGES, LEAVING | SLOTS)),
        rarely(("1+1", "deepseek-v3", PLAIN, 3, PAGES, LEAVING | ASIDE)),
        ("1+1", "deepseek-v3", LITTLE_KEPT, 0, PAGES, LEAVING | SLOTS),
        ("1+1", "opt", replace(HYBRID, handoff=Handoff.POOL), 3, FEW_PAGES, LEAVING | ASIDE | BATCHES | KINDS),
        rarely(("colocated", "gqa-untied", PLAIN, 2, PAGES, {"preemption", "eviction to the pool", "kept"})),
        ("colocated", "gqa-untied", PLAIN, 6, FEWER_PAGES, {"preemption", "eviction to the pool", "fetched", "kept"}),
        rarely(("colocated", "gqa-untied", PLAIN, 2, 0, {"preemption"})),
        ("colocated", "gqa-untied", SHARED, 13, PAGES, SLOTS),
        rarely(("colocated", "gqa-untied", SHARED, 15, 0, SLOTS)),
        rarely(("colocated", "opt", HYBRID, 2, PAGES, {"preemption"} | KINDS)),
        rarely(("colocated", "opt", HYBRID, 2, 0, {"preemption"} | KINDS)),
    ],
)
def test_what_they_say_is_what_they_say_alone(
    folder_of: Callable[[str], Path],
    reference_of: Callable[[Path], Any],
    tmp_path: Path,
    topology: str,
    name: str,
    policy: Policy,
    seed: int,
    pages: int,
    wanted: set[str],
) -> None:
    folder, tally, direct = folder_of(name), Tally(), topology == "1+1" and policy.block_use.why_not_direct is None
    cost = Believed() if policy.block_use.keeps_hidden else None
    with deployed(folder, topology, policy, tmp_path, cost, direct, PREFILL_BLOCKS, pages) as deployment:
        requests = asked(deployment, seed)
        assert len({request.service for request in requests}) == 2
        for request in requests:
            assert len(deployment.outputs[request.id]) == request.max_tokens
            compare(reference_of(folder), request.prompt, deployment.outputs[request.id], tally, f"{name}, {policy}")
        tally.check()
        held = deployment.decodes.held
        assert (held["requests"], held["blocks"], held["pages"]) == (0, 0, 0)
        assert wanted - happened(deployment) == set()


# The seeds are chosen so that every kind of event happens.
@pytest.mark.parametrize(
    ("topology", "seed", "look_ahead", "wanted"),
    [
        rarely(("1+1", 2, 0, LEAVING | {"written ahead"})),
        ("1+1", 3, 1, LEAVING | {"written ahead"}),
        ("colocated", 4, 0, {"preemption", "eviction to the pool", "fetched", "kept"}),
    ],
)
def test_with_copies_beside_the_steps_too(
    folder_of: Callable[[str], Path],
    reference_of: Callable[[Path], Any],
    tmp_path: Path,
    topology: str,
    seed: int,
    look_ahead: int,
    wanted: set[str],
) -> None:
    """Each copy ends some steps after it was ordered: what runs meanwhile touches nothing that it reads or writes."""
    folder, tally = folder_of("gqa-untied"), Tally()
    pages = FEWER_PAGES if topology == "colocated" else PAGES
    made = deployed(
        *(folder, topology, PLAIN, tmp_path, None, False, PREFILL_BLOCKS, pages),
        look_ahead=look_ahead,
        copies_beside=True,
    )
    with made as deployment:
        for request in asked(deployment, seed):
            assert len(deployment.outputs[request.id]) == request.max_tokens
            compare(reference_of(folder), request.prompt, deployment.outputs[request.id], tally, f"seed {seed}")
        tally.check()
        held = deployment.decodes.held
        assert (held["requests"], held["blocks"], held["pages"]) == (0, 0, 0)
        assert wanted - happened(deployment) == set()


@pytest.mark.parametrize("look_ahead", [rarely(0), 1])
def test_what_a_prefill_worker_that_decodes_hands_on_is_said_as_it_is_said_alone(
    folder_of: Callable[[str], Path], reference_of: Callable[[Path], Any], tmp_path: Path, look_ahead: int
) -> None:
    """Requests decode there first, then on the other worker, or to their end where that has no room."""
    folder, tally = folder_of("gqa-untied"), Tally()
    made = deployed(folder, "1+1", PLAIN, tmp_path, None, True, PREFILL_BLOCKS, look_ahead=look_ahead, lends=True)
    with made as deployment:
        requests = asked(deployment, 2)
        for request in requests:
            assert len(deployment.outputs[request.id]) == request.max_tokens
            compare(reference_of(folder), request.prompt, deployment.outputs[request.id], tally, "handed on")
        tally.check()
        assert 0 < deployment.num_sent < len(requests)
        assert {*happened(deployment)} >= {"kept"}, "answers are kept behind the prompts that the other had"
        for name in ("prefill-0", "decode-0"):
            held = deployment.cores[name].held
            assert (held["requests"], held["blocks"], held["pages"]) == (0, 0, 0)
