#!/bin/sh
# The gateway's container: a node of the Ray cluster, as KubeRay says how to start it, and the deployment as long as Ray
# is there.
set -eu
ulimit -n 65536 || true  # less where the machine allows less
(
  while :; do
    until ray health-check > /dev/null 2>&1; do sleep 1; done  # the head may be away for a while
    alignedserve serve --config /etc/alignedserve/serve.yaml && break
    sleep 2
  done
) &
exec sh -c "$KUBERAY_GEN_RAY_START_CMD"
