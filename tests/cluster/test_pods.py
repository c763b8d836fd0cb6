"""Tests of the deletion of each kind of pod under load. Ray's nodes on this machine stand in for the pods of the chart:
what Kubernetes does to a pod is done to the node, with the chart's own commands.

The launcher is on the head's node: several nodes with one address cannot be told apart by a launcher that joins them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import run

from tests.cluster.conftest import clustered, deployed_on
from tests.cluster.test_chart import of_kind, pods
from tests.cluster.test_nodes import served_while
from tests.end_to_end.client import Wanted, check_greedy, mixed
from tests.end_to_end.deployment import deployed
from tests.end_to_end.test_restart import DRAIN, STREAM, under_load
from tests.rare import rare

HEAD, MACHINE = {"CPU": 0}, {"CPU": 4, "decode": 1}


def streams(seed: int) -> list[Wanted]:
    return [Wanted(each.prompt, STREAM, stream=True, ignore_eos=True) for each in mixed(4, seed)]


def pre_stop(role: str) -> list[str] | None:
    """Return the command that Kubernetes runs in a pod before the signal, if the chart has one."""
    (container,) = [each for each in pods()[role]["spec"]["containers"] if each["name"].startswith("ray-")]
    command: list[str] | None = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    return command


@rare
def test_what_helm_tests_with_is_answered(tmp_path: Path) -> None:
    (pod,) = of_kind("Pod")
    (shell, flag, line) = pod["spec"]["containers"][0]["command"]
    (tmp_path / "alignedserve").write_text(f'#!/bin/sh\nexec {sys.executable} -m alignedserve "$@"\n')
    (tmp_path / "alignedserve").chmod(0o755)
    names = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SERVICE": "127.0.0.1", "HOME": str(tmp_path)}
    with deployed("--api-key", "a-key-of-clients") as deployment:
        there = line.replace(":8000/", f":{deployment.port}/")
        refused = run([shell, flag, there], env=names, capture_output=True, text=True, check=False)
        assert refused.returncode != 0, "the test fails where the key is wrong"
        names["ALIGNEDSERVE_SERVER_API_KEY"] = "a-key-of-clients"
        told = run([shell, flag, there], env=names, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip()


@rare
def test_a_machine_is_deleted_beside_another_one() -> None:
    assert pre_stop("worker") is None, "the signal is all that it gets"
    with clustered(HEAD, MACHINE, MACHINE) as nodes, deployed_on(nodes, "2xcolocated", *DRAIN) as deployment:
        under_load(deployment, lambda: nodes.delete(1))


@rare
def test_the_only_machine_is_deleted_and_another_one_takes_its_place() -> None:
    with clustered(HEAD, MACHINE) as nodes, deployed_on(nodes, "colocated", *DRAIN) as deployment:

        def replace() -> None:
            nodes.delete(1)
            nodes.add(MACHINE)

        under_load(deployment, replace)


@rare
def test_the_gateways_pod_ends_its_streams_and_then_itself() -> None:
    with clustered(HEAD, MACHINE) as nodes, deployed_on(nodes, "colocated", *DRAIN) as deployment:
        command = pre_stop("gateway")
        assert command is not None

        def stop() -> None:
            program = [sys.executable, "-m", *command, "--port", str(deployment.port)]
            run(program, check=True, env=os.environ | nodes.environment)

        check_greedy(wanted := streams(3), served_while(deployment, wanted, stop))
        assert deployment.ended() == 0
