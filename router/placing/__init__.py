"""Admission and placement: whether a request is admitted, and which worker and node take it.

admission.py   whether the router admits a new request, and when a refused client should come again
answers.py     whether decode workers have memory for the answers of all chats, with a new chat, to the end
held.py        what places hold: beginnings of prompts, and the memory of open requests, as predicted
line.py        the line in which chats wait that asked for no promise, and how far predicted waits are off
placement.py   which worker runs a prompt, and which decode worker the request goes on to
recent.py      what came lately: a moving sum that forgets
workers.py     a worker as the router knows it: the prompts before a new one, and the room
"""
