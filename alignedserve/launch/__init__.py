"""Starting a deployment and keeping it alive, on one machine or a Ray cluster.

    launch.serve ──▶ plan: the parts ──▶ RunningDeployment ◀── orders of users, signals, signs of life
                                            │ what happened            ▲ a part began, a part ended
                                            ▼                          │
                                          Keeper ── start, end ──▶ Host: ProcessHost, or Actors ──▶ start: one part

actors.py       The host that runs each part as a Ray actor.
bounded.py      Bounds on calls to Ray, and on the end of a deployment there: Ray may not answer.
cluster.py      Serve on a Ray of its own, or join a Ray cluster and plan where the parts go.
deployment.py   Bring a keeper what happens; stop all parts in the end.
fork_server.py  A process that has loaded what other processes need, and forks them.
host.py         What a keeper asks of a host, and the events by which it hears of parts.
keeper.py       Decide what becomes of each part: when it starts, starts again, pauses, is retired or ended.
launch.py       Start a deployment, or go on with what a launcher that was killed has left.
nodes.py        The nodes of a cluster as the launcher sees them: what each told of itself, and what is not used.
orders.py       What users order while it serves: scale, restart, reload.
placing.py      Which nodes of a cluster, there or to come, have room for which parts; or why none has.
plan.py         Which parts a deployment has, and what each is told.
preflight.py    What a node has and what it lacks, looked at on the node before a part is placed there.
processes.py    The host that runs each part as a process of this machine.
roles.py        `topology: auto`: the workers of each kind, from nodes, GPUs and promises.
screen.py       What the user sees of a start, and how to ask once requests are taken.
start.py        Start one part: its core, its shell and its hands, in a process or a Ray actor.
starts.py       Which parts start or run, which is slowest, and which stands still or is silent.
succession.py   What a launcher that is killed leaves, and how the next one goes on with it.
"""
