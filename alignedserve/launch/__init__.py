"""Starting a deployment and keeping it alive, on one machine or a Ray cluster.

bounded_calls.py  Calls with a limit: Ray may not answer.
cluster.py        Join a Ray cluster that is there already, and plan where the parts go.
ending.py         The bound on the end of a deployment on Ray, whatever does not answer.
fork_server.py    A process that has loaded what other processes need, and forks them.
keeper.py         What all launchers share: start parts again that have ended, add and retire workers, stop.
keeper_events.py  What a keeper hears, one event after the other, and what is due at a time.
launch.py         Start a deployment with the launcher that its configuration names.
local.py          The launcher that runs each part as a process of this machine.
orders.py         What users order a keeper while it serves: reload, scale, restart.
part_actor.py     A part as an actor of Ray.
placing.py        Which nodes of a cluster, there or to come, have room for which parts; or why none has.
plan.py           Which parts a deployment has, and what each has for itself on one machine.
ray_actors.py     The launcher that runs each part as a Ray actor, here or on the nodes of a cluster.
ready.py          Find out whether a deployment takes requests, and what its user may try first.
reloading.py      Read the settings again, and find what may change while it serves.
restarting.py     Which part `alignedserve restart` replaces next, and how.
scaling.py        Which workers `alignedserve scale` starts, and which it retires.
start.py          Start one part in this process: its core, its shell and its hands.
start_screen.py   How a long start is shown: its slowest part, as a bar or as lines of the log.
starts.py         Which parts start or run, which is slowest, and which stands still or is silent.
succession.py     What a launcher that is killed leaves, and how the next one goes on with it.
"""
