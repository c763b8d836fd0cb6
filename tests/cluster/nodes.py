"""A Ray cluster on this machine, each node with processes of its own, in a process that ends with its standard input.

    python -m tests.cluster.nodes '{"CPU": 0}' '{"CPU": 4, "decode": 2}' ...

The first node is the head. The program prints the cluster's address once all nodes are there. A line on standard input
is
an order, and is answered with a line: `add {"CPU": 4}` starts a node, `kill 1` ends the second node's processes, and
`delete 1` does so as `ray start --block` does, the first process of a pod, when it gets SIGTERM. `restart gcs_server`
starts the head's server again, which has been killed.
"""

from __future__ import annotations

import json
import sys

STORE_BYTES = 80 << 20  # about the least that Ray accepts


def main() -> None:
    from ray.cluster_utils import Cluster

    def arguments(text: str) -> dict[str, object]:
        resources = json.loads(text)
        numbers = {"num_cpus": resources.pop("CPU"), "num_gpus": resources.pop("GPU", 0)}
        return {**numbers, "resources": resources, "object_store_memory": STORE_BYTES}

    head, *workers = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args=arguments(head) | {"include_dashboard": False})
    nodes = [cluster.head_node, *(cluster.add_node(**arguments(worker)) for worker in workers)]
    print(cluster.address, flush=True)
    try:
        for line in sys.stdin:
            order, what = line.split(maxsplit=1)
            if order == "add":
                nodes.append(cluster.add_node(**arguments(what)))
            elif order == "restart":
                cluster.head_node.kill_gcs_server(check_alive=False)
                cluster.head_node.start_gcs_server()
            elif order == "delete":
                nodes[int(what)]._drain_node_before_shutdown()
                cluster.remove_node(nodes[int(what)], allow_graceful=True)
            else:
                cluster.remove_node(nodes[int(what)], allow_graceful=False)
            print(line.strip(), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
