"""What runs a core: links between processes, the clock, logs, and the part that a process is.

clock.py      The clock that shells read and hand to their cores.
control.py    What a user tells a running deployment: `alignedserve stop`, `alignedserve scale`.
journal.py    What a part's log says of a request on its road: where it goes next, never its words.
link_keys.py  Who may speak on a deployment's links: whoever has its keys, which its launcher makes and hands
links.py      Links between processes: one inbox each, and a numbered one-way link to every member one talks to.
listener.py   The socket that HTTP arrives at.
logs.py       Log lines of every process: when, how severe, which part, what; as text or as JSON.
part.py       A part of a deployment: what it is told when it starts, where it works, and its links.
shell.py      The shell of every part: delivers events to a core, performs its commands, reads the clock.
"""
