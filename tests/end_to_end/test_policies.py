"""A deployment serves with the policy of the page about policies, and goes on where a policy raises."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.end_to_end.deployment import BACK_S, deployed, wait_until
from tests.end_to_end.test_explain import chat
from tests.policies.test_page import CODE, COMMANDS
from tests.rare import rare

RAISES = """

from alignedserve.policies import PlacementPolicy


class Raises(PlacementPolicy):
    def worker(self, request, workers):
        return request.nothing
"""


@rare  # tests/policies
def test_it_decides_and_one_that_raises_is_named_while_chats_go_on(tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text(CODE + RAISES)
    [flags] = [shlex.split(command)[1:] for command in COMMANDS if command.startswith("serve")]
    with deployed(*flags, typed_in=tmp_path) as deployment:
        assert [chat(deployment).status_code for _ in range(3)] == [200] * 3
        assert chat(deployment, slo={"jct_ms": 600_000}).status_code == 200
        refused = chat(deployment, slo={"ttft_ms": 0.001})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "the policy policy.py refuses it" in refused.json()["error"]["message"]
        log = deployment.whole_log()
        assert "the policy policy.py for placement: raised: AttributeError: " in log
        assert "the default decides" in log
        wait_until(lambda: deployment.metric("policy_failures_total") == 5, BACK_S, deployment.log)
