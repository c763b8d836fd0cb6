"""The router: predicts lengths, admits requests and places them.

actor.py     The router as a process.
demand.py    What there is to do for workers, and how near what was promised is to being missed, as the router
open.py      The open requests, and where each of them is.
recovery.py  What a router that has just started waits for before it places anything.
roll.py      Who is there, and who is told of whom.
sizing.py    How many workers of a kind the load takes: more of them soon, fewer slowly.
state.py     The router's core: who is there, and on which worker each open request is (open.py).
"""
