"""Custom policies decide in simulated deployments, and what they do wrong harms none."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path

import pytest

from alignedserve.config.topology import Topology
from alignedserve.lab.fuzzing.fuzz import attempt
from alignedserve.lab.fuzzing.invariants import Rule
from alignedserve.lab.fuzzing.scenario import from_tree, to_tree
from alignedserve.lab.fuzzing.scenario_drawing import draw_scenario
from alignedserve.lab.loads.workload import Workload
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import Settings
from alignedserve.policies.guard import OwnPolicies
from alignedserve.policies.kinds import PolicyKind
from alignedserve.policies.source import PolicySource
from alignedserve.scheduling.policy import Policy
from tests.rare import thinned
from tests.simulator.summary import summary_of

IMPORTS = "from alignedserve.policies import *\nfrom alignedserve.schedulers.scheduler import Scheduler\n"
ALL = "[*view.waiting, *view.prompts, *view.decodes]"
# kind -> what its method is called, and an answer that every deployment can follow
ANSWERS = {
    PolicyKind.ORDER: ("OrderPolicy", "key(self, request)", "-request.arrival_at"),
    PolicyKind.SCHEDULER: ("Scheduler", "plan(self, view)", f"self.step_of(view, {ALL})"),
    PolicyKind.PLACEMENT: ("PlacementPolicy", "worker(self, request, workers)", "workers[-1].name"),
    PolicyKind.ADMISSION: ("AdmissionPolicy", "refuse(self, request, load)", "2.0 if load.num_open > 3 else None"),
    PolicyKind.PREDICTOR: ("PredictorPolicy", "length(self, request)", "3.0"),
}
KINDS = pytest.mark.parametrize("kind", [*ANSWERS])


def written(kind: PolicyKind, answer: str | None = None) -> PolicySource:
    name, method, usual = ANSWERS[kind]
    return PolicySource("mine.py", f"{IMPORTS}class Mine({name}):\n    def {method}: return {answer or usual}\n")


def run(source: PolicySource | None) -> Simulation:
    workload, topology = Workload(num_requests=8, rate=400.0), Topology.parse("2xcolocated")
    simulation = Simulation(Settings(topology=topology, workload=workload, policy=Policy(own=OwnPolicies(source))))
    assert summary_of(simulation).problems == ()
    return simulation


@cache
def without() -> Simulation:
    return run(None)


@KINDS
def test_a_policy_decides(kind: PolicyKind) -> None:
    own, usual = run(written(kind)), without()
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
    assert failure.startswith(f"{kind.label}: {'raised' if answer == '1 / 0' else 'nonsense'}, ")
    assert f"the policy mine.py for {kind.label}: " in caplog.text


# What hostile policies answer: always the newest, the worst worker, a refusal, a length that no output has.
HOSTILE = {
    PolicyKind.ORDER: "-request.arrival_at",
    PolicyKind.SCHEDULER: f"self.step_of(view, sorted({ALL}, key=lambda it: (-it.request.arrival_at, it.request.id)))",
    PolicyKind.PLACEMENT: "max(workers, key=lambda it: (it.wait_s, it.num_requests, it.name)).name",
    PolicyKind.ADMISSION: "1e9 if len(request.prompt) % 2 else None",
    PolicyKind.PREDICTOR: "1e300 if len(request.prompt) % 2 else 1",
}


@KINDS
@pytest.mark.parametrize("seed", thinned((3, 4, 5, 6), usual=1))
def test_whatever_a_policy_decides_all_invariants_hold(kind: PolicyKind, seed: int) -> None:
    """Every request ends, and has each of its tokens once."""
    assert attempt(draw_scenario(seed).with_own(OwnPolicies(written(kind, HOSTILE[kind])))).failure is None


@KINDS
def test_the_fuzzer_names_a_policy_that_fails(kind: PolicyKind) -> None:
    failure = attempt(draw_scenario(5).with_own(OwnPolicies(written(kind, "1 / 0")))).failure
    assert failure is not None
    assert failure.rule is Rule.POLICY
    assert failure.what.startswith(f"{kind.label}: raised, ")


def test_a_saved_scenario_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(written(PolicyKind.ORDER).text or "")
    source = PolicySource.parse(str(path))
    scenario = draw_scenario(3).with_own(OwnPolicies(source))
    tree = to_tree(scenario)
    assert tree["own_policy"] == str(path)
    assert "own" not in tree["policy"]
    assert from_tree(json.loads(json.dumps(tree))).policy.own == scenario.policy.own
