"""Tests of deploy/ and compose.yaml against the schemas of the programs that read them, none of which can run here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from alignedserve.cli.main import main
from alignedserve.config.choices import DeviceKind, Launcher
from alignedserve.config.config import Config, load
from alignedserve.core import WORKERS
from alignedserve.launch.cluster import decide_by_nodes
from alignedserve.launch.node_types import may_come, node_types
from alignedserve.launch.placing import ClusterNode, Placing
from alignedserve.launch.plan import parts_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY, K8S = ROOT / "deploy", ROOT / "deploy" / "k8s"
KUBERNETES = "1.31.0"
CLOUDS = ("cluster.aws.yaml", "cluster.gcp.yaml")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def manifests() -> list[dict[str, Any]]:
    names = read(K8S / "kustomization.yaml")["resources"]
    return [manifest for name in names for manifest in yaml.safe_load_all((K8S / name).read_text())]


def ray_cluster() -> dict[str, Any]:
    (found,) = [manifest for manifest in manifests() if manifest["kind"] == "RayCluster"]
    return found


def pods() -> dict[str, dict[str, Any]]:
    """Return the pod templates by the role in their labels."""
    spec = ray_cluster()["spec"]
    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return {template["metadata"]["labels"]["role"]: template for template in templates}


def schema(name: str) -> Any:
    return json.loads((Path(__file__).parent / "schemas" / name).read_text())


def test_the_heads_pod_drains_before_its_signal() -> None:
    spec = pods()["head"]["spec"]
    (head,) = spec["containers"]
    assert head["lifecycle"]["preStop"]["exec"]["command"] == ["alignedserve", "stop"]
    drain_s = load({}, {}, K8S / "serve.yaml").server.drain_s
    assert spec["terminationGracePeriodSeconds"] > drain_s + 10


# --- Clouds


@pytest.mark.parametrize("name", CLOUDS)
def test_ray_takes_the_files_of_clouds(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    whole = prepare_config(read(DEPLOY / name))
    validate_config(whole)
    types = whole["available_node_types"]
    assert set(types) == {"head", "serving", "prefill"}
    assert types["head"]["resources"] == {"CPU": 0}, "no worker is placed there"
    assert {"kv_pool", "prefill", "decode", "GPU"} <= set(types["serving"]["resources"])
    assert "kv_pool" not in types["prefill"]["resources"]


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
    coming = may_come(node_types(str(DEPLOY / name)), [])
    placing = Placing([ClusterNode("head", {"CPU": 0.0})], 0.0, may_travel=False, may_come=coming)
    config = decide_by_nodes(served(DEPLOY / "serve.yaml"), placing)
    assert (config.engine.device, config.ray.gpus_per_worker) == (DeviceKind.CUDA, 1.0), "they rent GPUs to compute"
    groups = replace(placing, gpus_per_worker=1.0).groups(
        *([part for role, part in parts_of(config) if role is kind] for kind in WORKERS)
    )
    assert [set(group) for group in groups] == [{"pool-0", "prefill-0", "decode-0"}]


# --- Kubernetes


def test_kubernetes_takes_the_manifests() -> None:
    import kubernetes_validate

    for manifest in manifests():
        if manifest["kind"] != "RayCluster":
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for role, template in pods().items():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": role, **template["metadata"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_kuberay_takes_the_cluster() -> None:
    jsonschema.validate(ray_cluster(), schema("ray_cluster.json"))


def test_each_pod_has_probes_a_token_and_shared_memory() -> None:
    for template in pods().values():
        (container,) = template["spec"]["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
        environment = {variable["name"]: variable for variable in container["env"]}
        assert environment["RAY_AUTH_MODE"]["value"] == "token"
        assert "secretKeyRef" in environment["RAY_AUTH_TOKEN"]["valueFrom"]
        (shared,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == "shared-memory"]
        assert shared["emptyDir"]["medium"] == "Memory"
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_pods_keep_the_restricted_standard() -> None:
    """Pod Security Standards, level restricted; and roots that are read only, and no token where nobody needs it."""
    autoscaler = ray_cluster()["spec"]["autoscalerOptions"]["securityContext"]
    for role, template in pods().items():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert not any(pod.get(shared) for shared in ("hostNetwork", "hostPID", "hostIPC"))
        assert all({"hostPath", "name"} - set(volume) for volume in pod["volumes"])
        assert role == "head" or pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            closed = container["securityContext"]
            assert closed["readOnlyRootFilesystem"]
            assert {"/tmp", "/data"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
            for context in (closed, autoscaler):
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"] == {"drop": ["ALL"]}


def test_pods_reach_each_other_names_and_the_web_alone() -> None:
    (policy,) = [manifest["spec"] for manifest in manifests() if manifest["kind"] == "NetworkPolicy"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert {port["port"] for rule in policy["egress"] for port in rule.get("ports", ())} == {53, 443, 6443}
    own = [{"podSelector": policy["podSelector"]}]
    assert own == policy["egress"][0]["to"] == policy["ingress"][0]["from"]
    assert all(rule.get("to") == own or rule.get("ports") for rule in policy["egress"])


def test_what_selects_pods_finds_some() -> None:
    labels = [template["metadata"]["labels"] for template in pods().values()]
    selectors = []
    for manifest in manifests():
        spec = manifest["spec"]
        if manifest["kind"] == "Service":
            selectors.append(spec["selector"])
        elif manifest["kind"] == "PodDisruptionBudget":
            selectors.append(spec["selector"]["matchLabels"])
        elif manifest["kind"] == "NetworkPolicy":
            selectors.append(spec["podSelector"]["matchLabels"])
    assert len(selectors) == 4
    assert all(any(selector.items() <= each.items() for each in labels) for selector in selectors)


def test_the_pool_fits_the_shared_memory_of_its_pod() -> None:
    config = served(K8S / "serve.yaml")
    (shared,) = [volume for volume in pods()["worker"]["spec"]["volumes"] if volume["name"] == "shared-memory"]
    assert (config.kvpool.memory_mb or 0) < int(shared["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 1024
    assert (config.launcher, config.ray.address, config.server.port) == (Launcher.RAY, "auto", 8000)


def test_the_gpus_of_a_pod_are_those_that_its_workers_compute_on() -> None:
    config, (container,) = served(K8S / "serve.yaml"), pods()["worker"]["spec"]["containers"]
    gpus = float(container["resources"]["limits"]["nvidia.com/gpu"])
    node = ClusterNode("pod", {"CPU": 8.0, "GPU": gpus, "kv_pool": 1.0, "prefill": 1.0, "decode": 1.0})
    config = decide_by_nodes(config, Placing([node], 0.0, may_travel=False))
    workers = config.topology.prefill_workers + config.topology.decode_workers
    assert config.engine.device is DeviceKind.CUDA
    assert (config.ray.gpus_per_worker or 0.0) * workers == gpus, "none idles, and none is missing"


def test_kustomize_names_the_configuration_of_this_content() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is missing: no kustomize")
    built = subprocess.run(["kubectl", "kustomize", K8S], capture_output=True, text=True, check=True).stdout
    made = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(built)}
    head = made["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]
    assert head["volumes"][0]["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"]
    assert head["containers"][0]["image"] == "alignedserve:cuda"


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
    assert "--requirepass" in services["redis"]["command"][-1]
    secrets = re.findall(r"\$\{(\w+):\?", (ROOT / "compose.yaml").read_text())
    assert set(secrets) == {"ALIGNEDSERVE_SERVER_API_KEY", "REDIS_PASSWORD", "GRAFANA_PASSWORD"}
    assert "ports" not in services["redis"]


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


def test_images_are_made_of_what_is_there() -> None:
    lines = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", "\n".join(lines), re.MULTILINE)
    made = [name for _, name in stages]
    assert made == ["wheel", "base", "cpu", "cuda"]
    assert all(base in made[:at] or base.startswith("python:") for at, (base, _) in enumerate(stages))
    assert all(stage in made for stage in re.findall(r"from=(\w+)", "\n".join(lines)))
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "EXPOSE", "ENTRYPOINT", "CMD", "USER"}
    assert {line.split()[0] for line in lines if line and not line.startswith("#")} <= known
    torch = re.search(r"^TORCH := torch==(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None
    assert f"ARG TORCH={torch[1]}" in lines


@pytest.mark.parametrize("script", ["head.sh"])
def test_shells_can_read_the_scripts(script: str) -> None:
    assert subprocess.run(["sh", "-n", K8S / script], capture_output=True).stderr == b""
