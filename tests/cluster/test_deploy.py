"""Tests of deploy/ and compose.yaml against the schemas of the programs that read them, none of which can run here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.cli.main import main
from alignedserve.config.choices import DeviceKind
from alignedserve.config.config import Config, load
from alignedserve.core import WORKERS
from alignedserve.gateway.access.keys import Scope, hash_key, key_ring
from alignedserve.launch.cluster import decide_by_nodes
from alignedserve.launch.placing import ClusterNode, Placing, cluster_file, may_come
from alignedserve.launch.plan import parts_of
from alignedserve.launch.roles import NodeOffer, choose

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CLOUDS = ("cluster.aws.yaml", "cluster.gcp.yaml")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def schema(name: str) -> Any:
    return json.loads((Path(__file__).parent / "schemas" / name).read_text())


# --- Clouds


@pytest.mark.parametrize("name", CLOUDS)
def test_ray_takes_the_files_of_clouds(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    whole = prepare_config(read(DEPLOY / name))
    validate_config(whole)
    types = whole["available_node_types"]
    assert set(types) == {"head", "serving"}
    assert types["head"]["resources"] == {"CPU": 0}, "no worker is placed there"
    assert types["serving"]["resources"] == {"CPU": 48, "GPU": 4}, "what a machine is for follows from its GPUs"


@pytest.mark.parametrize("name", CLOUDS)
def test_clouds_install_and_start_what_own_machines_do(name: str) -> None:
    ours, of_cloud = read(ROOT / "cluster.yaml"), read(DEPLOY / name)
    for key in ("file_mounts", "head_start_ray_commands"):
        assert of_cloud[key] == ours[key]
    started = re.findall(r"~/alignedserve/(deploy/[\w.]+)", (DEPLOY / name).read_text())
    assert started
    assert [path for path in started if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("name", CLOUDS)
def test_clouds_have_room_for_what_they_serve_where_there_is_but_a_head(name: str) -> None:
    coming = may_come(cluster_file(str(DEPLOY / name)).types, [])
    placing = Placing([ClusterNode("head", {"CPU": 0.0})], 0.0, may_travel=False, may_come=coming)
    config = decide_by_nodes(served(DEPLOY / "serve.yaml"), placing)
    assert (config.engine.device, config.ray.gpus_per_worker) == (DeviceKind.CUDA, 1.0), "they rent GPUs to compute"
    offer = NodeOffer(coming[0].name, coming[0].total["CPU"], coming[0].total["GPU"])
    config, lines = choose(config, [offer], read_config(DEMO_FOLDER), DEMO_FOLDER)
    assert lines[0].startswith("topology: 4xcolocated: ")
    groups = replace(placing, gpus_per_worker=1.0).groups(
        *([part for role, part in parts_of(config) if role is kind] for kind in WORKERS)
    )
    assert [set(group) for group in groups] == [{"pool-0", *(f"decode-{number}" for number in range(4))}]


# --- Containers


def served(path: Path) -> Config:
    return load({}, {}, path)


def test_compose_takes_the_file() -> None:
    whole = read(ROOT / "compose.yaml")
    jsonschema.validate(whole, schema("compose.json"))
    assert set(whole["services"]) == {"gateway", "redis", "prometheus", "grafana"}
    volumes = [volume.split(":") for service in whole["services"].values() for volume in service.get("volumes", ())]
    assert all(
        (ROOT / volume[0]).is_file() if volume[0].startswith("./") else volume[0] in whole["volumes"]
        for volume in volumes
    )


def test_containers_have_passwords_and_no_more_rights_than_they_need() -> None:
    services = read(ROOT / "compose.yaml")["services"]
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["pids_limit"] > 0, name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert re.search(r":\w+$", service["image"]) or re.search(r":v?\d+\.\d+", service["image"]), name
    secrets = re.findall(r"\$\{(\w+):\?", (ROOT / "compose.yaml").read_text())
    assert set(secrets) == {"ALIGNEDSERVE_SERVER_API_KEY", "METRICS_HASH", "REDIS_PASSWORD", "GRAFANA_PASSWORD"}
    assert {name for name, service in services.items() if "ports" in service} == {"gateway", "grafana"}


def test_the_password_of_redis_stands_in_no_command_line(tmp_path: Path) -> None:
    """Its container starts as it does in compose, with a program in the place of redis-server."""
    (tmp_path / "redis-server").write_text('#!/bin/sh\ncat "$1"; echo "$@"; stat -c %a "$1"\n')
    (tmp_path / "redis-server").chmod(0o755)
    command = read(ROOT / "compose.yaml")["services"]["redis"]["command"]
    *shell, line = [word.replace("$$", "$").replace("/tmp/", f"{tmp_path}/") for word in command]
    names = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_PASSWORD": "secret"}
    said = subprocess.run([*shell, line], env=names, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "requirepass secret"
    assert said[1].split()[1:] == "--appendonly yes --appendfsync always --maxmemory-policy noeviction".split()
    assert said[2] == "600"


def test_compose_serves_with_a_key_and_keeps_jobs_in_redis(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = read(ROOT / "compose.yaml")["services"]["gateway"]
    environment = {
        name: re.sub(r"\$\{(\w+):\?[^}]*\}", "secret-key", value) for name, value in gateway["environment"].items()
    }
    config = load({}, environment, None)
    assert (config.server.host, config.server.api_key, config.jobs.store) == (
        "0.0.0.0",
        "secret-key",
        "redis://:secret-key@redis:6379/0",
    )
    flags = [word for word in gateway["command"] if word.startswith("--")]
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = capsys.readouterr().out
    assert all(flag in said for flag in flags)


def test_containers_write_to_their_volumes_alone_where_nothing_else_is_put_into_them() -> None:
    """Compose cannot put the secret of Prometheus into a container whose root is read-only."""
    whole = read(ROOT / "compose.yaml")["services"]
    closed = {name for name, service in whole.items() if service.get("read_only")}
    assert closed == {"gateway", "redis", "grafana"} == {name for name in whole if "secrets" not in whole[name]}
    assert all(whole[name]["tmpfs"][0] == "/tmp" for name in closed)
    assert whole["grafana"]["tmpfs"][1:] == ["/var/lib/grafana"], "its own database, which nobody changes"


def test_prometheus_has_a_key_for_metrics_alone(tmp_path: Path) -> None:
    """The gateway's container starts as it does in compose, with a program in the place of alignedserve."""
    whole = read(ROOT / "compose.yaml")
    (tmp_path / "alignedserve").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n')
    (tmp_path / "alignedserve").chmod(0o755)
    gateway, file = whole["services"]["gateway"], tmp_path / "keys.yaml"
    assert gateway["environment"]["ALIGNEDSERVE_SERVER_KEYS_FILE"] == "/tmp/keys.yaml"
    command = [word.replace("$$", "$") for word in (*gateway["entrypoint"], *gateway["command"])]
    path = f"{tmp_path}:{os.environ['PATH']}"
    names = {"PATH": path, "METRICS_HASH": hash_key("prometheus"), "ALIGNEDSERVE_SERVER_KEYS_FILE": str(file)}
    subprocess.run(command, env=names, check=True)
    assert (tmp_path / "arguments").read_text().split() == gateway["command"]
    ring = key_ring("clients", str(file))
    caller = ring.caller("prometheus")
    assert caller is not None
    assert caller.scopes == {Scope.METRICS}
    assert whole["secrets"] == {"metrics_key": {"environment": "METRICS_KEY"}}
    (job,) = read(DEPLOY / "prometheus.yaml")["scrape_configs"]
    assert job["authorization"] == {"credentials_file": "/run/secrets/metrics_key"}
    head = (ROOT / "compose.yaml").read_text()
    (made,) = re.findall(r"METRICS_HASH=(.*)", head.partition("services:")[0])
    said = subprocess.run(
        ["sh", "-c", f"printf %s {made}"], env=names | {"METRICS_KEY": "prometheus"}, capture_output=True, check=True
    )
    assert said.stdout.decode() == hash_key("prometheus")


def test_images_are_made_of_what_is_there() -> None:
    lines = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", "\n".join(lines), re.MULTILINE)
    made = [name for _, name in stages]
    assert made == ["wheel", "base", "cpu", "cuda"]
    assert all(base in made[:at] or base.startswith("python:") for at, (base, _) in enumerate(stages))
    assert all(stage in made for stage in re.findall(r"from=(\w+)", "\n".join(lines)))
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD", "USER"}
    assert {line.split()[0] for line in lines if line and not line.startswith("#")} <= known
    assert {*re.findall(r"-r /locks/(\S+)|-r deploy/locks/(\S+)", "\n".join(lines))} == {
        *((name, "") for name in ("torch-cpu.txt", "torch-cuda.txt", "serve.txt", "image.txt", "image-cuda.txt")),
        ("", "build.txt"),
    }


def test_the_image_for_gpus_alone_has_flash_attention_3() -> None:
    _, cpu, cuda = re.split(r"^FROM base AS \w+$", (DEPLOY / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert "-r /locks/image-cuda.txt" in cuda
    assert "image-cuda.txt" not in cpu
    assert "tokenspeed-fa3==" in (DEPLOY / "locks" / "image-cuda.txt").read_text()
