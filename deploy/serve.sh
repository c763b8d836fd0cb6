#!/bin/sh
# Serves on the Ray cluster of this node, and keeps that up as long as the cluster is; returns once it serves.
#     serve.sh CONFIG        its log: ~/alignedserve/serve.log
set -eu
config=$1
cd "$HOME/alignedserve"
. deploy/env.sh
if [ -f serve.pid ]; then
  kill -TERM -- "-$(cat serve.pid)" 2> /dev/null || true  # of an earlier `ray up`, with all that it had started
fi
setsid nohup sh -c '
  while ray health-check > /dev/null 2>&1; do
    alignedserve serve --config "$0" && break  # it was told to stop
    sleep 2
  done
  rm -f serve.pid
' "$config" >> serve.log 2>&1 < /dev/null &
echo $! > serve.pid
alignedserve status --wait 1800
