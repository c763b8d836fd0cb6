"""Reads what users write of a device: its numbers, or grids that they measured (docs/how/simulate.md).

A GPU or a model has a name that devices.py knows, or numbers under the names of the fields of `Gpu` or `Model`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from alignedserve.errors import ProfileError, file_errors
from alignedserve.lab.devices.devices import GPUS, MODELS, Device, Gpu, Model, model_named
from alignedserve.lab.devices.gpu_truth import FORMAT, NAMES

T = TypeVar("T", Gpu, Model)
_YAML = (".yaml", ".yml")
_WANTED = {"str": "a text", "bool": "true or false", "int": "a whole number above 0"}
_DEVICE = ("gpu", "model", "tensor_parallel")
_ABOUT = (*_DEVICE, "layers", "dtype", "units", "source", "licence", "compiled_by")
_GRIDS = ("format", "about", *NAMES, "all_reduce", "hidden_token_us")


def read(path: Path) -> Mapping[str, Any]:
    """Return the tree of a YAML or JSON file; an empty tree if it has none."""
    try:
        with file_errors(ProfileError, path, "read"):
            text = path.read_text(encoding="utf-8")
            tree = _parsed_yaml(text) if path.suffix in _YAML else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is not {'YAML' if path.suffix in _YAML else 'JSON'}: {error}") from None
    found = tree if isinstance(tree, dict) else {}
    if (path.suffix in _YAML or "gpu" in found) and not {"gpu"} <= {*found} <= {*_DEVICE}:
        raise ProfileError(f"{path} has to have gpu, model and tensor_parallel, and nothing else")
    return found


def _parsed_yaml(text: str) -> Any:
    import yaml  # here, because few runs need it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def described(about: Mapping[str, Any]) -> Device:
    """Return the device with this `gpu`, `model` and `tensor_parallel`."""
    gpu, model = _known(Gpu, "gpu", GPUS, about.get("gpu")), _model(about.get("model"))
    ranks = about.get("tensor_parallel", 1)
    if not isinstance(ranks, int):
        raise ProfileError(f"tensor_parallel is a number of GPUs, not {ranks!r:.40}")
    return Device(gpu, model, ranks)


def _model(given: object) -> Model:
    found = model_named(given.lower()) if isinstance(given, str) else None
    return found or _known(Model, "model", MODELS, given)


def _known(kind: type[T], role: str, known: Mapping[str, T], given: object) -> T:
    if isinstance(given, dict):
        return _from_numbers(kind, role, given)
    for name, entry in known.items():
        if isinstance(given, str) and given.lower() in (name, entry.name.lower()):
            return entry
    raise ProfileError(f"{role} is neither one of {', '.join(known)}, nor given with {_needed(kind)}")


def _from_numbers(kind: type[T], role: str, given: Mapping[str, Any]) -> T:
    types = {field.name: str(field.type) for field in fields(kind)}
    defaults = [(field.name, field.default) for field in fields(kind)]
    for key, value in given.items():
        if key not in types:
            raise ProfileError(f"{role} has no {key!r:.40}: it has {', '.join(types)}")
        if (key, value) not in defaults and not _suits(types[key], value):
            wanted = _WANTED.get(types[key], "a number above 0")
            raise ProfileError(f"{role}: {key} cannot be {value!r:.40}, it is {wanted}")
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in given]
    if missing:
        raise ProfileError(f"{role} lacks {missing[0]}: it needs {_needed(kind)}")
    return kind(**given)


def _needed(kind: type[Gpu] | type[Model]) -> str:
    return ", ".join(field.name for field in fields(kind) if field.default is MISSING)


def _suits(wanted: str, value: object) -> bool:
    if wanted in ("str", "bool"):
        return isinstance(value, str if wanted == "str" else bool)
    if value is None:
        return wanted.endswith("None")
    whole = isinstance(value, int) and not isinstance(value, bool)
    return (whole or (wanted.startswith("float") and isinstance(value, float))) and 0 < float(str(value)) < float("inf")


def grids(tree: Mapping[str, Any], device: Device) -> Mapping[str, Any]:
    """Return a profile with grids of a user; several ranks that did not measure their all-reduce have the GPU's."""
    if tree.get("format") != FORMAT:
        raise ProfileError(f"measured grids of format {FORMAT} are needed")
    unknown = [*{*tree} - {*_GRIDS}, *(f"about.{key}" for key in {*tree["about"]} - {*_ABOUT})]
    if unknown:
        raise ProfileError(f"measured grids have no {unknown[0]!r:.40}: they have {', '.join(_GRIDS)}")
    about = {**tree["about"], "tensor_parallel": device.ranks, "layers": device.model.layers}
    return {"all_reduce": device.all_reduce("devices.py"), **tree, "about": about}
