"""Starting a deployment and keeping it alive, on one machine or a Ray cluster.

cluster.py     The same parts on the nodes of a Ray cluster that others have started (`ray up`, `ray start`,
keeper.py      Keeps the parts of a deployment: starts them, starts again whichever ends, adds some, lets some
launch.py      Starts a deployment, and keeps it alive until it is told to stop.
local.py       The parts as processes of this machine.
node_types.py  Which nodes a cluster may have beside those that are there: of the types in the file that `ray
placing.py     Which nodes of a cluster have room for which parts, and in words why there is none.
plan.py        Which parts a deployment has, and on one machine what is theirs alone: a device, a port where
ray_actors.py  The same parts as Ray actors.
ready.py       Whether a deployment takes requests, and what its user reads then.
scaling.py     `alignedserve scale`: which workers are started, and which are to end.
start.py       Start one part in this process: build the core, the shell and the hands of its role, and run them.
"""
