"""Admission and placement: which worker and which node take a request.

admission.py   Whether a new request is taken in, and when to come again if it is not (429 with Retry-After).
beginnings.py  Which nodes' pools have the beginning of a prompt, as far as the router can know: what begins
holdings.py    How much memory open requests are to hold together, as predicted.
loads.py       Workers by what is before them, the least of them at hand, however many they are.
placement.py   Which worker runs a prompt, and which decode worker it is to go on to.
returning.py   Clients that were refused and told when to come again, until they have: of one class.
rooms.py       Which decode worker a prompt is to go on to: the one whose batch is about as long, of those
"""
