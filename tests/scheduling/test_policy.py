"""What a policy means for memory."""

from __future__ import annotations

import pytest

from alignedserve.scheduling.policy import DEFAULT_POLICY, Cache, Chunking, Layout, Policy, Room


@pytest.mark.parametrize(
    ("policy", "drops"),
    [
        (DEFAULT_POLICY, True),
        (Policy(room=Room.WHOLE), False),
        (Policy(chunking=Chunking.NONE), False),
        (Policy(room=Room.GROWING), True),
        (Policy(room=Room.GROWING, blocks=Layout.BIDIRECTIONAL), False),
        (Policy(room=Room.GROWING, cache=Cache.HYBRID), False),
    ],
)
def test_what_no_layer_reads_is_given_back_where_each_request_gets_blocks_of_its_own_as_it_runs(
    policy: Policy, drops: bool
) -> None:
    assert policy.drops is drops


@pytest.mark.parametrize(
    ("policy", "keeps_hidden", "keeps_apart"),
    [
        (DEFAULT_POLICY, False, True),
        (Policy(room=Room.GROWING, blocks=Layout.BIDIRECTIONAL), False, False),
        (Policy(room=Room.GROWING, cache=Cache.HYBRID), True, False),
    ],
)
def test_what_a_block_may_hold(policy: Policy, keeps_hidden: bool, keeps_apart: bool) -> None:
    assert (policy.block_use.keeps_hidden, policy.block_use.keeps_apart) == (keeps_hidden, keeps_apart)
