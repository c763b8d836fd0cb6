"""Policies of one's own decide in simulated deployments, and what they do wrong harms none."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from alignedserve.policies.guard import OwnPolicies
from alignedserve.policies.kinds import PolicyKind
from alignedserve.policies.source import PolicySource
from alignedserve.scheduling.policy import Policy
from alignedserve.simulator.fuzzing.fuzz import attempt
from alignedserve.simulator.fuzzing.invariants import Rule
from alignedserve.simulator.fuzzing.scenario import from_tree, to_tree
from alignedserve.simulator.fuzzing.scenario_drawing import draw_scenario
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import Settings
from alignedserve.simulator.workload import Workload

IMPORTS = "from alignedserve.policies import *\n"
# kind -> what its method is called, and an answer that every deployment can follow
ANSWERS = {
    PolicyKind.ORDER: ("OrderPolicy", "key(self, request)", "-request.arrival_at"),
}
KINDS = pytest.mark.parametrize("kind", [*ANSWERS])


def written(kind: PolicyKind, answer: str | None = None) -> PolicySource:
    name, method, usual = ANSWERS[kind]
    return PolicySource("mine.py", f"{IMPORTS}class Mine({name}):\n    def {method}: return {answer or usual}\n")


def run(source: PolicySource | None) -> Simulation:
    workload = Workload(num_requests=40, rate=400.0)
    simulation = Simulation(Settings(workload=workload, policy=Policy(own=OwnPolicies(source))))
    assert simulation.run().problems == ()
    return simulation


@KINDS
def test_a_policy_decides(kind: PolicyKind) -> None:
    own, usual = run(written(kind)), run(None)
    assert own.policy_failures.lines() == []
    assert own.world.digest != usual.world.digest
    assert own.world.digest == run(written(kind)).world.digest


@KINDS
@pytest.mark.parametrize("answer", ["1 / 0", "object()"])
def test_where_a_policy_fails_the_default_decides(
    kind: PolicyKind, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "alignedserve.policy"):
        failing = run(written(kind, answer))
    [failure] = failing.policy_failures.lines()
    assert failure.startswith(f"{kind.value}: {'raised' if answer == '1 / 0' else 'nonsense'}, ")
    assert f"the policy mine.py for {kind.value}: " in caplog.text


@KINDS
@pytest.mark.parametrize("seed", [3, 4])
def test_a_policy_holds_what_must_hold(kind: PolicyKind, seed: int) -> None:
    assert attempt(draw_scenario(seed).with_own(OwnPolicies(written(kind)))).failure is None


@KINDS
def test_the_fuzzer_names_a_policy_that_fails(kind: PolicyKind) -> None:
    failure = attempt(draw_scenario(3).with_own(OwnPolicies(written(kind, "1 / 0")))).failure
    assert failure is not None
    assert failure.rule is Rule.POLICY
    assert failure.what.startswith(f"{kind.value}: raised, ")


def test_a_saved_scenario_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(written(PolicyKind.ORDER).text or "")
    source = PolicySource.parse(str(path))
    scenario = draw_scenario(3).with_own(OwnPolicies(source))
    tree = to_tree(scenario)
    assert tree["own_policy"] == str(path)
    assert "own" not in tree["policy"]
    assert from_tree(json.loads(json.dumps(tree))).policy.own == scenario.policy.own
