"""The router predicts lengths, and admits and places requests.

actor.py      runs the router as a process
lifecycle.py  the table of an open request's life: states, facts and transitions; and the open requests
lengths.py    how long outputs will be, by what came of similar prompts
members.py    which members there are, whom each is told of, and what a router that has just started awaits
sizing.py     how many workers of a kind the load needs
state.py      the router's core
suspects.py   where requests run that may have ended their workers
"""
