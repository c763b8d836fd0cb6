"""Real deployments that are hurt while they serve: `python -m tests.chaos`.

absent.py     what a machine lacks for a fault
clock.py      a wall clock that steps for a deployment alone; clock.c is what it preloads
comparing.py  an answer under faults against the undisturbed answer
faults.py     kills, freezes, full and slow disks, stepped clocks, cut wires
load.py       clients that ask and note
networks.py   machines of a cluster that can be cut off
parts.py      processes that may be hurt
scenarios.py  every topology and launcher
table.py      the state file and the table
trial.py      one deployment: calm, hurt, calm again
"""
