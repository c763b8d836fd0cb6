"""Admission and placement: whether a request is admitted, and which worker and node take it.

admission.py   whether the router admits a new request, and when a refused client should come again
beginnings.py  which pools and devices have the beginning of a prompt
holdings.py    how much memory open requests will hold together, as predicted
loads.py       workers ordered by the work before them
own.py         policies of one's own that place and admit requests
placement.py   which worker runs a prompt, and which decode worker the request goes on to
rooms.py       which decode worker has room and a batch of about the prompt's length
"""
