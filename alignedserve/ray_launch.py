"""The same parts as Ray actors.

Ray places the actors and starts them again when their process dies; messages do not travel through
it. All parts of this launcher are on one machine: links between machines need keys, which the
launcher for clusters will hand out.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignedserve.config import Config
from alignedserve.core import Role
from alignedserve.kvpool.arena import remove_stale
from alignedserve.launch import GRACE_S, PREFIX, announce_when_ready, no_ray
from alignedserve.parts import PartSpec, Stoppable, start

NAMESPACE = "alignedserve"
LOOK_S = 0.5  # between two looks at whether a part has failed for good
_CRASHED = 1


class PartActor:
    """One part in a Ray actor: it runs in a thread, so that the actor can be asked and stopped."""

    def __init__(self, spec: str) -> None:
        from alignedserve.config import parse
        from alignedserve.errors import AlignedServeError
        from alignedserve.logs import set_up

        self._failure: str | None = None
        self._running: Stoppable | None = None
        self._user_error = AlignedServeError
        self._spec = PartSpec.from_json(spec)
        set_up(parse(self._spec.config).log, self._spec.name)
        self._thread = threading.Thread(target=self._run, name=self._spec.name, daemon=True)
        self._thread.start()

    def failure(self) -> str | None:
        """What keeps the part from running at all: its user's fault, in one line."""
        return self._failure

    def stop(self, patience_s: float) -> None:
        if self._running is not None:
            self._running.stop()
        self._thread.join(patience_s)

    def _started(self, part: Stoppable) -> None:
        self._running = part

    def _run(self) -> None:
        try:
            start(self._spec, self._started)
        except self._user_error as error:
            self._failure = str(error)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(_CRASHED)  # Ray starts the actor again


def serve_on_ray(config: Config, specs: Sequence[PartSpec]) -> int:
    """Serve until stopped; the exit code."""
    try:
        import ray
    except ImportError:
        raise no_ray() from None
    happened: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # a part's failure; None: stop
    ray.init(include_dashboard=False, log_to_driver=True, logging_level="warning", namespace=NAMESPACE)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: happened.put(None))
    actors: dict[str, Any] = {}
    try:
        actors = _start(ray, specs)
        announce_when_ready(config, give_up=lambda: happened.put(None))
        return _watch(ray, actors, happened)
    finally:
        _stop(ray, config, specs, actors)


def _start(ray: Any, specs: Sequence[PartSpec]) -> dict[str, Any]:
    """One placement group: the parts of a node share its memory, so they are placed together."""
    group = ray.util.placement_group([{"CPU": 0.01} for _ in specs], strategy="STRICT_PACK")
    ray.get(group.ready())
    actors = {}
    for bundle, spec in enumerate(specs):
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        )
        options: dict[str, Any] = {
            "name": f"{spec.deployment}-{spec.name}",
            "num_cpus": 0.01,
            "max_restarts": -1,
            "max_task_retries": 0,  # a repeated call could repeat tokens
            "max_concurrency": 2,  # `failure` answers while `stop` waits
            "scheduling_strategy": where,
            "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        }
        actors[spec.name] = ray.remote(PartActor).options(**options).remote(spec.to_json())
    return actors


def _watch(ray: Any, actors: dict[str, Any], happened: queue.SimpleQueue[str | None]) -> int:
    while True:
        try:
            happened.get(timeout=LOOK_S)
            return 0
        except queue.Empty:
            for actor in actors.values():
                failure = _failure(ray, actor)
                if failure is not None:
                    print(f"alignedserve: {failure}", file=sys.stderr, flush=True)
                    return 2


def _failure(ray: Any, actor: Any) -> str | None:
    """None too where the actor is being started again."""
    try:
        failure: str | None = ray.get(actor.failure.remote(), timeout=LOOK_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None
    return failure


def _stop(ray: Any, config: Config, specs: Sequence[PartSpec], actors: dict[str, Any]) -> None:
    """The gateway first: it drains, and the others are needed for that."""
    gateways = [actors[spec.name] for spec in specs if spec.role is Role.GATEWAY and spec.name in actors]
    others = [actors[spec.name] for spec in specs if spec.role is not Role.GATEWAY and spec.name in actors]
    for group, patience_s in ((gateways, config.server.drain_s + GRACE_S), (others, GRACE_S)):
        stopping = [actor.stop.remote(patience_s) for actor in group]
        ray.wait(stopping, num_returns=len(stopping), timeout=patience_s + GRACE_S)
    for actor in actors.values():
        ray.kill(actor)
    ray.shutdown()
    remove_stale(Path(config.kvpool.directory), PREFIX)
