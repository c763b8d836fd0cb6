"""A launcher on a Ray that, once requests are served, fails five times to make the actor of decode-0.

    python -m tests.launch.failing

The program ends, as told, when that actor is there.
"""

from __future__ import annotations

import signal
import sys
from concurrent.futures import Future
from typing import Any
from unittest.mock import MagicMock

from alignedserve.config.config import load
from alignedserve.launch import actors, cluster, deployment, keeper
from alignedserve.launch.orders import Reloading
from tests.launch.keepers import specs_of

NUM_FAILURES = 5


def main() -> int:
    sys.modules["ray"] = ray = MagicMock()
    ray.exceptions.RayError = ConnectionError
    ray.nodes.return_value = [{"Alive": True}]
    lost: Future[str] = Future()
    lost.set_exception(ConnectionError("the actor died"))
    tries: list[str] = []

    def remote(named: type) -> Any:
        actor = MagicMock()
        made = actor.options.return_value.remote.return_value
        made.__ray_ready__ = MagicMock()  # a mock makes no attribute of such a name by itself
        if named.__name__ == "decode-0":
            tries.append(named.__name__)
            if len(tries) == 1:
                made.run.remote.return_value.future.return_value.add_done_callback = lambda hear: hear(lost)
            elif len(tries) <= 1 + NUM_FAILURES:
                raise RuntimeError("Ray does not answer")
            else:
                signal.raise_signal(signal.SIGTERM)
        return actor

    ray.remote = remote
    setattr(deployment, "announce_when_ready", lambda _, announce: announce("serves"))  # noqa: B010  (it is not exported)
    keeper.FIRST_PAUSE_S = 0.01
    keeper.GRACE_S = deployment.GRACE_S = deployment.ENDED_S = actors.ANSWER_S = 0.0
    config = load({"topology": "1+1", "launcher": "ray", "server.drain_s": 0.1}, {}, None)
    return cluster.serve_on_ray(config, specs_of(config), Reloading(config, lambda: config))


if __name__ == "__main__":
    sys.exit(main())
