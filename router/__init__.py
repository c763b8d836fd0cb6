"""The router: it predicts lengths, admits requests and places them.

actor.py      runs the router as a process
demand.py     says how much work there is for workers, and how near promises are to being missed
lifecycle.py  the table of an open request's life: states, facts and transitions
open.py       the open requests, each with its present attempt
recovery.py   what a router that has just started waits for
roll.py       which members there are, and which members each of them is told of
sizing.py     how many workers of a kind the load needs
state.py      the router's core
suspects.py   where requests run that may be what ends their workers
"""
