"""The parts that the cores of both workers are made of.

part.py         The verbs that all parts share, and the roster of a core's parts.
core.py         A worker's core: parts that hear events, and a turn of acts after each event.
common.py       The state that all parts of a worker's core share.
arrivals.py     What others tell a worker about single requests: run a prompt, drop it, expect so long an output.
queue.py        Prompts that wait on a worker for room.
prefixes.py     Prompts that begin as others did: what the pool still has of their beginning is not computed again.
prompt_rate.py  How long a token of the prompts that wait takes, from what such prompts took lately.
idle_trials.py  Measure again how fast a slow machine is, while the worker has nothing to do.
step_end.py     How a step begins and ends: pairs come free, the worker learns its time, requests get tokens.
owners.py       What a worker tells the owners of its requests: each token once, and again where a frame was lost.
router_link.py  What a worker tells the router: what it holds, what moved on, how much is left; what metrics show.
pool_link.py    The pool as a worker knows it.
pool_holds.py   The requests whose pages the pool keeps for a worker until it releases them.
compression.py  Pages that a worker compresses for the pool, beside its steps.
repeats.py      What is said again when a frame may have been lost.
retirement.py   How a worker ends: it takes nothing new, and stops when it is idle.
"""
