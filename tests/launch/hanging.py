"""A launcher on a cluster whose Ray answers nothing, and of which one call does not return.

    python -m tests.launch.hanging CALL END_S

The program prints a line when the deployment would serve, and a line when it hangs in the call. END_S is the bound on
its end.
"""

from __future__ import annotations

import ctypes
import sys
from unittest.mock import MagicMock

from alignedserve.config.config import load
from alignedserve.launch import actors, bounded, cluster, deployment, keeper, nodes
from alignedserve.launch.orders import Reloading
from alignedserve.launch.plan import LOOPBACK


def hang(*_: object, **__: object) -> None:
    """Never return to Python, which hears no signal then."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    libc.pthread_mutex_lock(mutex)


def main() -> None:
    call, end_s = sys.argv[1:]
    sys.modules["ray"] = ray = MagicMock()
    ray.exceptions.RayError = Exception
    ray.util.get_node_ip_address.return_value = LOOPBACK
    ray.nodes.return_value = [
        {"Alive": True, "NodeID": "node", "NodeManagerAddress": LOOPBACK, "Resources": {"CPU": 8.0}}
    ]
    actor = ray.remote.return_value.options.return_value.remote.return_value
    actor.__ray_ready__ = MagicMock()  # a mock makes no attribute of such a name by itself
    ray.configure_mock(**{f"{call}.side_effect": hang})
    setattr(deployment, "announce_when_ready", lambda *_: print("serves", flush=True))  # noqa: B010  (it is not exported)
    setattr(nodes.ClusterNodes, "look", lambda _: None)  # noqa: B010  (what a node says would come by a call that hangs)
    keeper.GRACE_S = deployment.GRACE_S = deployment.ENDED_S = actors.ANSWER_S = 0.0
    bounded.END_S, bounded.AT_ONCE_S = float(end_s), 0.1
    config = load({"topology": "1+1", "launcher": "ray", "ray.address": "auto", "server.drain_s": 0.1}, {}, None)
    sys.exit(cluster.serve_on_cluster(config, Reloading(config, lambda: config)))


if __name__ == "__main__":
    main()
