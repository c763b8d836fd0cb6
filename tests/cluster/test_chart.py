"""Tests of the chart as Helm renders it: Kubernetes and KubeRay take it, pods are closed, values do what they say."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.config.choices import DeviceKind, Launcher
from alignedserve.config.config import Config, load
from alignedserve.gateway.access.keys import KeysFile, hash_key
from alignedserve.launch.cluster import decide_by_nodes
from alignedserve.launch.placing import ClusterFile, ClusterNode, NodeType, Placing, cluster_file
from alignedserve.launch.roles import NodeOffer, choose
from tests.cluster.test_deploy import schema
from tests.helm import CHART, NAME, ROOT, helm, refusal, rendered

KUBERNETES = "1.31.0"
WITH_ALL = (
    "monitor: true\nkeys: tenants\nstore: {redis: true}\ngateway: {claim: jobs}\n"
    "machines: {gpus: 4}\nhead: {redis: 'db:6390'}"
)
OWN = "model: /models/own"
WITHOUT_GPUS = "machines: {gpus: 0}"
VALUES = ("", WITH_ALL, WITHOUT_GPUS)
Pod = dict[str, Any]


def of_kind(kind: str, values: str = "") -> list[dict[str, Any]]:
    return [manifest for manifest in rendered(values) if manifest["kind"] == kind]


def ray_cluster(values: str = "") -> dict[str, Any]:
    (found,) = of_kind("RayCluster", values)
    return found


def groups(values: str = "") -> dict[str, dict[str, Any]]:
    """Return the groups of pods by the role in the labels of their template."""
    spec = ray_cluster(values)["spec"]
    every = spec["headGroupSpec"], *spec["workerGroupSpecs"]
    return {group["template"]["metadata"]["labels"]["role"]: group for group in every}


def pods(values: str = "") -> dict[str, Pod]:
    """Return each role's pods with the containers that KubeRay adds to them: its autoscaler to the head's, and to
    others one that waits for the head, with the rights of ours."""
    made = {role: copy.deepcopy(group["template"]) for role, group in groups(values).items()}
    for role, pod in made.items():
        (ours,) = pod["spec"]["containers"]
        if role == "head":
            options = ray_cluster(values)["spec"]["autoscalerOptions"]
            added = {key: options[key] for key in ("env", "resources", "securityContext", "volumeMounts")}
            pod["spec"]["containers"].append({"name": "autoscaler", "image": "ray", **added})
        else:
            kept = {key: ours[key] for key in ("image", "securityContext", "env", "volumeMounts")}
            waits = {"name": "wait-gcs-ready", "resources": {}, **kept}
            pod["spec"]["initContainers"] = [waits, *pod["spec"].get("initContainers", ())]
    return made


def served(tmp_path: Path, values: str = "") -> Config:
    """Return the configuration that the gateway's pod reads."""
    (settings,) = of_kind("ConfigMap", values)
    path = tmp_path / "serve.yaml"
    path.write_text(settings["data"]["serve.yaml"])
    return load({}, {}, path)


# --- What reads it


def test_helm_has_nothing_to_say_against_it() -> None:
    linted = helm("lint", "--strict", CHART)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("values", VALUES)
def test_kubernetes_takes_the_manifests(values: str) -> None:
    import kubernetes_validate

    assert {manifest["metadata"]["name"] for manifest in of_kind("Pod", values)} == {f"{NAME}-test"}
    for manifest in rendered(values):
        if manifest["kind"] not in ("RayCluster", "ServiceMonitor"):
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for role, pod in pods(values).items():
        whole = {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {"name": role, **pod["metadata"]}}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)


def test_prometheus_scrapes_with_a_key_of_its_own() -> None:
    assert of_kind("ServiceMonitor") == []
    (monitor,), (service,) = of_kind("ServiceMonitor", "monitor: true\nsecret: mine\nkeys: k"), of_kind("Service")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["authorization"] == {"credentials": {"name": "mine", "key": "metrics-key"}}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


@pytest.mark.parametrize("values", VALUES)
def test_kuberay_takes_the_cluster(values: str) -> None:
    jsonschema.validate(ray_cluster(values), schema("ray_cluster.json"))


def test_its_version_is_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{chart["version"]}"\n' in project
    assert chart["appVersion"] == chart["version"]


def test_shells_can_read_the_script() -> None:
    assert subprocess.run(["sh", "-n", CHART / "files" / "gateway.sh"], capture_output=True).stderr == b""
    (settings,) = of_kind("ConfigMap")
    assert settings["data"]["gateway.sh"].strip() == (CHART / "files" / "gateway.sh").read_text().strip()


# --- Pods are closed

ALLOWED = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def faults(pod: Pod) -> Iterator[str]:
    """Yield what the Pod Security Standard *restricted* forbids, and what we ask for beyond it."""
    spec, whole = pod["spec"], pod["spec"].get("securityContext", {})
    yield from (f"{shared} of the machine" for shared in ("hostNetwork", "hostPID", "hostIPC") if spec.get(shared))
    yield from (f"volume {volume['name']}" for volume in spec["volumes"] if not volume.keys() - {"name"} <= ALLOWED)
    yield from (
        "an emptyDir without a limit"
        for each in spec["volumes"]
        if "sizeLimit" not in each.get("emptyDir", {"sizeLimit": 1})
    )
    if whole.get("sysctls"):
        yield "sysctls"
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        yield from (f"{container['name']}: {fault}" for fault in _faults_of(container, whole))


def _faults_of(container: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    both = whole | own
    if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
        yield "may run as root"
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "system calls are not limited"
    if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
        yield "may get more rights"
    capabilities = own.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or {*capabilities.get("add", ())} - {"NET_BIND_SERVICE"}:
        yield "has capabilities"
    if own.get("procMount", "Default") != "Default" or any("hostPort" in port for port in container.get("ports", ())):
        yield "reaches into the machine"
    if own.get("readOnlyRootFilesystem") is not True or "/tmp" not in {
        m["mountPath"] for m in container["volumeMounts"]
    }:
        yield "writes into its image"
    if container["name"] != "wait-gcs-ready":  # KubeRay gives the container that waits its own
        limits = container["resources"].get("limits", {})
        yield from (f"has no limit of {what}" for what in ("memory", "ephemeral-storage") if what not in limits)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("role", ["head", "gateway", "worker"])
def test_pods_keep_the_restricted_standard(role: str, values: str) -> None:
    assert [*faults(pods(values)[role])] == []


def _set(*path: str | int, to: Any) -> Callable[[Pod], None]:
    def change(pod: Pod) -> None:
        *way, last = path
        inner: Any = pod["spec"]
        for step in way:
            inner = inner[step]
        inner[last] = to

    return change


FIRST = "containers", 0, "securityContext"


@pytest.mark.parametrize(
    "opened",
    [
        _set("hostNetwork", to=True),
        _set("securityContext", "runAsNonRoot", to=False),
        _set(*FIRST, "runAsUser", to=0),
        _set("securityContext", "seccompProfile", to={"type": "Unconfined"}),
        _set(*FIRST, "allowPrivilegeEscalation", to=True),
        _set(*FIRST, "privileged", to=True),
        _set(*FIRST, "capabilities", to={"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
        _set(*FIRST, "readOnlyRootFilesystem", to=False),
        _set("containers", 1, "securityContext", to={}),
        _set("containers", 0, "resources", to={}),
        _set("containers", 0, "resources", "limits", to={"memory": "2Gi"}),
        _set("containers", 0, "ports", to=[{"containerPort": 1, "hostPort": 1}]),
        _set("volumes", to=[{"name": "root", "hostPath": {"path": "/"}}]),
        _set("volumes", to=[{"name": "endless", "emptyDir": {}}]),
    ],
)
def test_a_pod_that_is_opened_is_found(opened: Callable[[Pod], None]) -> None:
    pod = pods()["head"]
    opened(pod)
    assert [*faults(pod)] != []


def test_only_the_autoscaler_speaks_to_kubernetes() -> None:
    """KubeRay gives the head's pod a service account, with which it asks for pods."""
    assert {pod["spec"].get("automountServiceAccountToken", True) for pod in pods().values()} == {False}
    has_token = [
        (container["name"], mount["mountPath"], {*(of for source in volume["projected"]["sources"] for of in source)})
        for pod in pods().values()
        for volume in pod["spec"]["volumes"]
        for container in pod["spec"]["containers"]
        for mount in container["volumeMounts"]
        if mount["name"] == volume["name"] and "projected" in volume
    ]
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert has_token == [("autoscaler", folder, {"serviceAccountToken", "configMap", "downwardAPI"})]


def test_secrets_go_to_those_who_need_them_and_stand_in_no_manifest() -> None:
    def secrets(pod: Pod) -> set[str]:
        (ours, *_) = pod["spec"]["containers"]
        return {each["valueFrom"]["secretKeyRef"]["key"] for each in ours["env"] if "valueFrom" in each}

    assert {role: secrets(pod) for role, pod in pods(WITH_ALL).items()} == {
        "head": {"ray-token"},
        "gateway": {"ray-token", "store-url", "hf-token"},
        "worker": {"ray-token", "hf-token"},
    }
    assert secrets(pods()["gateway"]) == {"ray-token", "api-key", "hf-token"}
    assert all(
        {"name": "RAY_AUTH_MODE", "value": "token"} in pod["spec"]["containers"][0]["env"] for pod in pods().values()
    )
    assert of_kind("Secret") == []


def test_keys_are_a_file_that_changes_with_its_secret_and_no_other_pod_has_it(tmp_path: Path) -> None:
    values = "keys: tenants"
    config = served(tmp_path, values)
    assert (config.server.keys_file, served(tmp_path).server.keys_file) == ("/etc/alignedserve-keys/keys.yaml", None)
    held = {role: [v for v in pod["spec"]["volumes"] if "secret" in v] for role, pod in pods(values).items()}
    assert held == {
        "head": [],
        "gateway": [{"name": "keys", "secret": {"secretName": "tenants", "defaultMode": 0o440}}],
        "worker": [],
    }
    (container,) = pods(values)["gateway"]["spec"]["containers"]
    (mounted,) = [mount for mount in container["volumeMounts"] if mount["name"] == "keys"]
    assert mounted == {"name": "keys", "mountPath": "/etc/alignedserve-keys", "readOnly": True}, (
        "a subPath never changes"
    )


def test_a_key_that_is_taken_out_of_the_secret_is_refused(tmp_path: Path) -> None:
    """As kubelet does it: the file is a link into a folder that is a link, which is renamed over the last one."""

    def put(version: str, names: list[str]) -> None:
        folder = tmp_path / version
        folder.mkdir()
        entries = [{"name": name, "hash": hash_key(f"key of {name}")} for name in names]
        (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}))
        (tmp_path / "next").symlink_to(version)
        (tmp_path / "next").rename(tmp_path / "..data")

    put("first", ["one", "two"])
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    keys = KeysFile(None, str(tmp_path / "keys.yaml"))
    assert all(keys.read().caller(f"key of {name}") is not None for name in ("one", "two"))
    put("second", ["one"])
    assert keys.read().caller("key of one") is not None
    assert keys.read().caller("key of two") is None


def test_prometheus_gets_no_key_of_clients() -> None:
    assert "monitor needs keys" in refusal("monitor: true")


def test_the_head_keeps_what_ray_knows_where_the_values_say() -> None:
    assert "gcsFaultToleranceOptions" not in ray_cluster()["spec"]
    assert ray_cluster(WITH_ALL)["spec"]["gcsFaultToleranceOptions"] == {
        "redisAddress": "db:6390",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "alignedserve", "key": "redis-password"}}},
    }


def test_a_machine_looks_at_itself_before_its_pod_serves(tmp_path: Path) -> None:
    """The command runs as the pod runs it, with the settings of the chart and a model that is not there."""
    (_, preflight) = pods()["worker"]["spec"]["initContainers"]
    gpus = pods()["worker"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert preflight["resources"]["limits"]["nvidia.com/gpu"] == gpus, "it sees what the workers will see"
    assert {mount["mountPath"] for mount in preflight["volumeMounts"]} >= {"/dev/shm", "/etc/alignedserve"}
    served(tmp_path, "model: /nowhere/model")
    program, *words = [word.replace("/etc/alignedserve", str(tmp_path)) for word in preflight["command"]]
    done = subprocess.run([sys.executable, "-m", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "/nowhere/model is not here" in done.stdout


def test_helm_test_chats_by_the_service() -> None:
    (pod,) = of_kind("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert [*faults(pod)] == []
    (container,) = pod["spec"]["containers"]
    (service,) = of_kind("Service")
    names = {each["name"]: each.get("value") for each in container["env"]}
    assert names["SERVICE"] == service["metadata"]["name"]
    assert "app" not in pod["metadata"].get("labels", {}), "it is a client, and no part of the deployment"


# --- The network


def reached(role: str, values: str = "") -> dict[str, set[int | str]]:
    """Return the ports at which this role's pods are reached, and which they reach, by all policies that select them;
    `own` are all ports of the deployment's pods."""
    labels = groups(values)[role]["template"]["metadata"]["labels"]
    found: dict[str, set[int | str]] = {"ingress": set(), "egress": set()}
    for policy in (manifest["spec"] for manifest in of_kind("NetworkPolicy", values)):
        if not policy["podSelector"]["matchLabels"].items() <= labels.items():
            continue
        for direction, whom in (("ingress", "from"), ("egress", "to")):
            for rule in policy.get(direction, ()):
                own = [{"podSelector": {"matchLabels": {"app": NAME}}}]
                assert rule.get(whom, own) == own
                found[direction] |= {"own"} if whom in rule else {port["port"] for port in rule["ports"]}
    return found


def test_pods_reach_and_are_reached_by_what_they_need_alone() -> None:
    assert reached("head") == {"ingress": {"own"}, "egress": {"own", 53, 443, 6443}}
    assert reached("gateway", OWN) == {"ingress": {"own", 8000}, "egress": {"own", 53}}
    assert reached("worker", OWN) == {"ingress": {"own"}, "egress": {"own", 53}}
    assert reached("gateway", f"{OWN}\nstore: {{redis: true, port: 6380}}")["egress"] == {"own", 53, 6380}
    assert reached("gateway", f"{OWN}\nsettings: {{jobs: {{files: 's3://bucket'}}}}")["egress"] == {"own", 53, 443}
    traces = f"{OWN}\nsettings: {{server: {{otlp_endpoint: 'http://collector:4318'}}}}"
    assert reached("gateway", traces)["egress"] == {"own", 53, 4318}
    assert reached("head", WITH_ALL)["egress"] == {"own", 53, 443, 6443, 6390}


@pytest.mark.parametrize(("model", "fetches"), [("org/name", True), ("smollm2", True), ("/models/own", False)])
def test_pods_reach_the_hub_only_where_the_model_is_fetched(model: str, fetches: bool) -> None:
    for role in ("gateway", "worker"):
        assert (443 in reached(role, f"model: {model}")["egress"]) is fetches


def test_policies_close_every_pod_in_both_directions() -> None:
    (every,) = [
        p["spec"] for p in of_kind("NetworkPolicy") if p["spec"]["podSelector"] == {"matchLabels": {"app": NAME}}
    ]
    assert {*every["policyTypes"]} == {"Ingress", "Egress"}


# --- What selects, and names


def test_what_selects_pods_finds_them() -> None:
    labels = {role: group["template"]["metadata"]["labels"] for role, group in groups().items()}
    (service,) = of_kind("Service")
    assert [role for role, each in labels.items() if service["spec"]["selector"].items() <= each.items()] == ["gateway"]
    ports = {port["name"]: port["containerPort"] for port in pods()["gateway"]["spec"]["containers"][0]["ports"]}
    assert ports[service["spec"]["ports"][0]["targetPort"]] == service["spec"]["ports"][0]["port"]
    held = []
    for budget in (manifest["spec"] for manifest in of_kind("PodDisruptionBudget")):
        wanted = {"role": [budget["selector"]["matchLabels"].get("role")]}
        wanted |= {each["key"]: each["values"] for each in budget["selector"].get("matchExpressions", ())}
        held += [(role, budget["maxUnavailable"]) for role in labels if role in wanted["role"]]
    assert held == [("head", 0), ("gateway", 0), ("worker", 1)]


def test_two_releases_share_no_name_and_no_pod() -> None:
    one, other = rendered(), rendered(name="documents")
    assert not {m["metadata"]["name"] for m in one} & {m["metadata"]["name"] for m in other}
    assert NAME not in yaml.safe_dump_all(other)


@pytest.mark.parametrize("values", ["", "settings: {server: {drain_s: 600}}", "settings: {server: {drain_s: 0.5}}"])
def test_the_gateways_pod_drains_before_its_signal(values: str, tmp_path: Path) -> None:
    spec = pods(values)["gateway"]["spec"]
    (container,) = spec["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["alignedserve", "stop"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready", "clients come when it serves"
    assert spec["terminationGracePeriodSeconds"] >= served(tmp_path, values).server.drain_s + 59


# --- Values


def test_what_is_served_is_what_the_values_say(tmp_path: Path) -> None:
    values = (
        "model: org/name\ntopology: 2+3\npromises: {ttftMs: 500, tbtMs: 50}\nmachines: {poolMemoryMb: 9000}\n"
        "settings: {engine: {max_step_tokens: 4096}, server: {max_queue_tokens: 3000000}, ray: {gpus_per_worker: 0}}"
    )
    config = served(tmp_path, values)
    assert (config.launcher, config.ray.address, config.server.port) == (Launcher.RAY, "auto", 8000)
    assert (config.model, str(config.topology), config.kvpool.memory_mb) == ("org/name", "2+3", 9000)
    assert (config.slo.ttft_ms, config.slo.tbt_ms) == (500, 50)
    assert (config.engine.max_step_tokens, config.server.max_queue_tokens) == (4096, 3_000_000)
    assert config.ray.gpus_per_worker == 0, "settings outweigh what the chart has"


def test_the_example_of_the_guide_is_taken(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text(encoding="utf-8")
    (values,) = re.findall(r"In `chats.yaml`:\n\n((?:    .*\n)+)", guide)
    config = served(tmp_path, textwrap.dedent(values))
    assert (str(config.topology), config.ray.gpus_per_worker, config.slo.ttft_ms) == ("2xcolocated", 1, 500)


@pytest.mark.parametrize("values", VALUES)
def test_the_pool_fits_the_shared_memory_of_its_pod(values: str, tmp_path: Path) -> None:
    (shared,) = [each for each in pods(values)["worker"]["spec"]["volumes"] if each["name"] == "shared-memory"]
    assert shared["emptyDir"]["medium"] == "Memory"
    assert (served(tmp_path, values).kvpool.memory_mb or 0) < int(shared["emptyDir"]["sizeLimit"].removesuffix("Mi"))
    (container,) = pods(values)["worker"]["spec"]["containers"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_the_gpus_of_a_pod_are_those_that_its_workers_compute_on(tmp_path: Path) -> None:
    gpus = pods()["worker"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    node = ClusterNode("pod", {"CPU": 8.0, "GPU": gpus})
    config = decide_by_nodes(served(tmp_path), Placing([node], 0.0, may_travel=False))
    offer = NodeOffer("pod", 8.0, gpus)
    config, _ = choose(config, [offer], read_config(DEMO_FOLDER), DEMO_FOLDER)
    workers = config.topology.prefill_workers + config.topology.decode_workers
    assert config.engine.device is DeviceKind.CUDA
    assert (config.ray.gpus_per_worker or 0.0) * workers == gpus, "none idles, and none is missing"


def test_without_gpus_it_asks_for_none_and_computes_on_cpus(tmp_path: Path) -> None:
    resources = pods(WITHOUT_GPUS)["worker"]["spec"]["containers"][0]["resources"]
    assert "nvidia.com/gpu" not in resources["limits"] | resources["requests"]
    config = decide_by_nodes(served(tmp_path, WITHOUT_GPUS), Placing([], 0.0, may_travel=False))
    assert config.engine.device is DeviceKind.CPU


def test_machines_are_as_many_as_the_values_say(tmp_path: Path) -> None:
    group = groups(values := "machines: {least: 2, most: 7, cpus: 16}")["worker"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 7)
    started = group["rayStartParams"]
    assert started["num-cpus"] == "16"
    assert "resources" not in started, "what a machine is for follows from its GPUs"
    (settings,) = of_kind("ConfigMap", values)
    (tmp_path / "cluster.yaml").write_text(settings["data"]["cluster.yaml"])
    told = cluster_file(str(tmp_path / "cluster.yaml"))
    assert told == ClusterFile([NodeType("serving", {"CPU": 16.0, "GPU": 2.0}, 7)], [], 2)
    assert served(tmp_path, values).ray.cluster_file == "/etc/alignedserve/cluster.yaml"
    alone = {role: groups()[role]["rayStartParams"]["num-cpus"] for role in ("head", "gateway")}
    assert alone == {"head": "0", "gateway": "0"}, "no worker is placed there"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ("modle: demo", "modle"),
        ("model: ''", "model"),
        ("topology: 1-1", "topology"),
        ("promises: {ttftMs: 0}", "ttftMs"),
        ("promises: {ttft: 5}", "ttft"),
        ("image: Not An Image", "image"),
        ("secret: {api-key: in-the-clear}", "secret"),
        ("keys: {keys: []}", "keys"),
        ("store: {port: 70000}", "port"),
        ("machines: {gpus: -1}", "gpus"),
        ("machines: {gpus: two}", "gpus"),
        ("machines: {memory: 32}", "memory"),
        ("machines: {roles: {decode: 1}}", "roles"),
        ("gateway: {cpus: 0}", "cpus"),
        ("head: {redis: 'redis://db'}", "redis"),
    ],
)
def test_wrong_values_are_refused_by_name(values: str, named: str) -> None:
    assert named in refusal(values)


def test_fewer_machines_at_most_than_at_least_are_refused() -> None:
    assert "machines.most" in refusal("machines: {least: 5, most: 4}")
