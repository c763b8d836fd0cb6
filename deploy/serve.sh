#!/bin/sh
# Serve on the Ray cluster of this node as long as the cluster is up; return once it serves, or say why it does not.
#     serve.sh CONFIG        its log: ~/alignedserve/serve.log
# What the launcher says is shown as it comes: faults of nodes, what it waits for, the topology, and what runs where.
# The log grows by a line for each request and is only appended to, so logrotate may cut it while it is written:
#     /home/USER/alignedserve/serve.log { size 100M copytruncate rotate 3 }
set -eu
config=$1
cd "$HOME/alignedserve"
. deploy/env.sh
if [ -f serve.pid ]; then
  # Stop the deployment of an earlier `ray up`: it drains before it leaves the port.
  before=$(cat serve.pid)
  kill -s TERM -- "-$before" 2> /dev/null || true
  for _ in $(seq 60); do
    # Who has ended and is not buried counts for nothing: in a container the first process may bury nobody.
    sed 's/.*) //' /proc/[0-9]*/stat 2> /dev/null | grep -q "^[^ZX] [0-9]* $before " || break
    sleep 1
  done
fi
if [ -f serve.log ]; then mv -f serve.log serve.log.before; fi
: > serve.log
rm -f serve.ended
setsid nohup sh -c '
  echo $$ > serve.pid
  while ray health-check > /dev/null 2>&1; do
    alignedserve serve --config "$0" && break  # it was told to stop
    if [ $? = 2 ] && ! grep -q "^serving " serve.log; then break; fi  # a setting is wrong, or there was no place for all
    sleep 2
  done
  rm -f serve.pid
  touch serve.ended
' "$config" >> serve.log 2>&1 < /dev/null &
shown=0 ended=
show() {
  lines=$(wc -l < serve.log)
  if [ "$lines" -gt "$shown" ]; then sed -n "$((shown + 1)),${lines}{s/^alignedserve: //p}" serve.log; fi
  shown=$lines
}
for _ in $(seq 7200); do  # nodes come, and a large model is loaded: `serve` itself ends a start in which nothing moves
  if [ -f serve.ended ]; then ended=yes; fi  # looked at first: it may serve, and end, between two looks
  show
  if grep -q "^serving " serve.log; then
    show
    grep -A3 "^serving " serve.log  # on which address, what is promised, and a line to try
    exit 0
  fi
  if [ "$ended" ]; then break; fi
  sleep 1
done
tail -n 20 serve.log >&2
exit 1
