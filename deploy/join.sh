#!/bin/sh
# Join this machine to a Ray cluster, with the flags of `ray start`, until the head is gone. `ray down` stops only the head
# of a `local` cluster; its nodes end within half a minute, and would leave helper processes here.
set -eu
cd "$HOME/alignedserve"
. deploy/env.sh
rm -f ray.pid  # the loop of an earlier `ray up` that waits below must not stop what starts now
ray stop
setsid nohup sh -c '
  echo $$ > ray.pid
  ray start --block "$@"
  if [ "$(cat ray.pid)" = $$ ]; then ray stop --force; rm ray.pid; fi
' join "$@" > ray.log 2>&1 < /dev/null &
