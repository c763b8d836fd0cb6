"""The shell, which runs a core as a process: the turn loop, links between processes, the clock and logs.

bounded_threads.py  Threads for work on what clients send, which is given up after a while.
clock.py         The clock of every process, which never jumps.
control.py       How a user speaks to a running deployment: `alignedserve stop`, `alignedserve scale`.
event_loop.py    The event loop of asyncio.
link_keys.py     The keys of a deployment's links: only a process that has them may send.
links.py         Links between processes: each process has one inbox and a one-way link to each other member.
listener.py      The socket at which HTTP arrives.
logs.py          The format of log lines: text or JSON.
loop_watch.py    Watch that the loops of a process turn; the process of one that stands still ends.
part.py          A part of a deployment: what it is told when it starts, where it works, and its links.
process.py       What the kernel says of this process and of its machine, for metrics.
shell.py         The turn loop of a real process: sockets, threads, results of work; it logs where requests go.
signs.py         The way of signs of life from parts to their launcher.
turn.py          The turn loop that real and simulated processes share: events in, commands out, timers, work.
work_note.py     A note in shared memory of what a core is working on, which outlives its process.
"""
