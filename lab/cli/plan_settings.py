"""Writes the settings that start the deployment of a plan, as `alignedserve serve --config` takes them."""

from __future__ import annotations

from typing import Any

from alignedserve.architectures.quantization import Quantization
from alignedserve.config.config import dump, every_setting, of_preset, plain, settings
from alignedserve.config.setting import leaves
from alignedserve.core import ServiceClass
from alignedserve.lab.planning.deployments import PlannedDeployment
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.trials.building import config_of
from alignedserve.loads.workload import Mixture
from alignedserve.loads.workload.amounts import Fixed

_NODE = 8  # GPUs of a machine: more are on a Ray cluster
_HUB = {  # a model of devices.py -> its id on the hub
    "opt-6.7b": "facebook/opt-6.7b",
    "opt-13b": "facebook/opt-13b",
    "opt-30b": "facebook/opt-30b",
    "opt-66b": "facebook/opt-66b",
    "bloom-176b": "bigscience/bloom",
    "codellama-34b": "codellama/CodeLlama-34b-hf",
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "yi-34b": "01-ai/Yi-34B-Chat",
}


def settings_text(trial: SimulationTrial, answer: PlannedDeployment, workload: Mixture) -> str:
    """Return YAML with what differs from the defaults of the trial's preset. What no file can say is in comments."""
    import yaml

    own = _of_answer(answer)
    given = dict(leaves(config_of(trial))) | own | _promises(workload)
    usual = dict(leaves(of_preset(trial.preset, {})))
    changed = {path: value for path, value in given.items() if value != usual[path] or path in ("preset", "model")}
    deployed = of_preset(trial.preset, changed)  # refuses what does not go together
    tree = dump(deployed, changed.keys() & settings().keys())
    said = [f"# {answer}: {answer.price:.2f} an hour. alignedserve serve --config THIS\n"]
    said += [] if "model" in own else ["# model: change it to the folder or the hub id of the model\n"]
    said += [
        f"# --set {path}={str(plain(value)).lower()}\n" for path, value in changed.items() if path not in settings()
    ]
    return "".join(said) + yaml.safe_dump(tree, sort_keys=False)


def _of_answer(answer: PlannedDeployment) -> dict[str, Any]:
    """Return the settings of a deployment's hardware."""
    declared = every_setting()
    found: dict[str, Any] = {
        "topology": answer.topology,
        "engine.device": declared["engine.device"].kind("cuda"),
        "engine.tensor_parallel_size": answer.offer.gpus,
    }
    if (model := _model_of(answer.offer.device)) is not None:
        found["model"] = model
        kinds = (kind for kind in Quantization if f"-{kind.value}-tp" in answer.offer.device)
        found["engine.quantization"] = next(kinds, Quantization.NONE)
    if answer.gpus > _NODE:
        found["launcher"] = declared["launcher"].kind("ray")
        found |= {"ray.address": "auto", "ray.gpus_per_worker": 1.0}
    return found


def _model_of(device: str) -> str | None:
    """Return the hub id of a named device's model, if it is known."""
    return next((hub for name, hub in _HUB.items() if f"-{name}-tp" in device or f"-{name}-int" in device), None)


def _promises(workload: Mixture) -> dict[str, float]:
    """Return the promises of chats, if all chats of the workload have the same."""
    promised = {stream.promise for stream in workload.streams if stream.promise.service is ServiceClass.RT}
    if len(promised) != 1:
        return {}
    promise = promised.pop()
    match promise.ttft_s, promise.tbt_s, promise.slo_factor:
        case Fixed(ttft_s), Fixed(tbt_s), Fixed(factor):
            return {"slo.ttft_ms": 1000 * factor * ttft_s, "slo.tbt_ms": 1000 * factor * tbt_s}
    return {}
