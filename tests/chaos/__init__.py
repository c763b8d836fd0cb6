"""Real deployments that are hurt while they serve: `python -m tests.chaos`.

absent.py     what a machine lacks for a fault; libraries to preload
clock.py      a wall clock that steps for a deployment alone; clock.c is what it preloads
comparing.py  answers that differ by a near tie alone
faults.py     kills, freezes, pauses, other weights, orders, full and slow disks, stepped clocks, cut wires, new keys
load.py       clients that ask, keep and meet limits
losses.py     flipped bits, bad wires, errors of disks, stores that forget
memory_group.py  a limit of memory for a part
networks.py   machines of a cluster that can be cut off, one way too
no_fork.py    a machine on which no process can begin; no_fork.c is what it preloads
oracle.py     what no honest service shows its clients
parts.py      processes that may be hurt
recording.py  clients that write down what they see
scenarios.py  every topology and launcher
table.py      the state file and the table
trial.py      one deployment: calm, hurt, calm again
wires.py      links that spoil, delay and break off; wires.c is what they preload
"""
