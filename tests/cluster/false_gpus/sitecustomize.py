"""What Python loads first on machines with false GPUs: torch counts as built for CUDA 13, and workers that were placed
on GPUs compute on CPUs. The launcher, the placing and the preflight are as they are."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _preflight(module: Any) -> None:
    module.torch_is_built_for = lambda: {"cuda": "13.0"}


def _cluster(module: Any) -> None:
    planned = module._plan

    def plan(config: Any, *others: Any) -> Any:
        engine = replace(config.engine, device=type(config.engine.device).CPU, kv_memory_mb=128, max_model_len=1024)
        pool = replace(config.kvpool, memory_mb=64)
        return planned(
            replace(config, engine=engine, kvpool=pool, ray=replace(config.ray, gpus_per_worker=None)), *others
        )

    module._plan = plan


CHANGED: dict[str, Callable[[Any], None]] = {
    "alignedserve.launch.preflight": _preflight,
    "alignedserve.launch.cluster": _cluster,
}


class _Changes:
    """Changes these modules as they are loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in CHANGED:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            load, change = spec.loader.exec_module, CHANGED[name]

            def exec_module(module: ModuleType) -> None:
                load(module)
                change(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


sys.meta_path.insert(0, _Changes())  # type: ignore[arg-type]
