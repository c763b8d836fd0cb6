"""How an engine handles forms other than KV, of requests on the device and of the pool's pages.

other.py        Another form of a request than KV: what the papers' hidden vectors do for an engine.
int8_pages.py   Converts a full page of KV to int8 and back (ALISE §3.2).
performing.py   Performs the orders of forms on a worker's engine.
"""
