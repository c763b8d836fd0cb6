"""Poison: requests that strike the process that works on them, at a place and in a way that they name.

places.py     where a request can strike: which function, and how the request is recognised there
planting.py   what runs in the processes of a deployment: it wraps these functions
trial.py      one request beside innocent ones, and what became of them
__main__.py   many kinds, one after the other, and a table of all of them
"""
