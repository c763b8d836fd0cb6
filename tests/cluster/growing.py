"""A Ray cluster on this machine whose nodes come and go by Ray's own autoscaler, with its provider for tests.

    python -m tests.cluster.growing FOLDER '{"CPU": 1, "decode": 1}' MOST

The head has no CPU, and is the only node at first. The program prints the cluster's address, and ends with its standard
input.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

STORE_BYTES = 80 << 20  # about the least that Ray accepts
IDLE_MINUTES = 0.1
CONFIG = "autoscaling.json"  # file name in the cluster's folder


def config(worker: dict[str, float], most: int, address: str) -> dict[str, object]:
    node = {"node_config": {}, "object_store_memory": STORE_BYTES}
    return {
        "cluster_name": "growing",
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_MINUTES,
        "docker": {},
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,  # all nodes have one address
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {"ssh_user": "nobody"},
        "available_node_types": {
            "ray.head.default": node | {"resources": {"CPU": 0}, "max_workers": 0},
            "serving": node | {"resources": worker, "min_workers": 0, "max_workers": most},
        },
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }


def main() -> None:
    folder, worker, most = sys.argv[1:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    import ray

    address = f"{ray.util.get_node_ip_address()}:{port}"
    path = Path(folder, CONFIG)
    path.write_text(json.dumps(config(json.loads(worker), int(most), address)))
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"),
        *(f"--autoscaling-config={path}", "--num-cpus=0", f"--object-store-memory={STORE_BYTES}"),
        *("--include-dashboard=false", "--disable-usage-stats"),
    ]
    soon = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "5"}
    env = {"RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "0", **soon}
    with subprocess.Popen(command, env=os.environ | env, stdout=sys.stderr) as head:
        while head.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((address.partition(":")[0], port)) == 0:
                    break
        print(address, flush=True)
        sys.stdin.read()
        head.terminate()


if __name__ == "__main__":
    main()
