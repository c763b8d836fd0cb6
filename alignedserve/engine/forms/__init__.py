"""How an engine handles forms other than KV, of requests on the device and of the pool's pages.

hidden.py       Attention to hidden vectors, and K and V made of hidden vectors.
int8_pages.py   Converts a full page of KV to int8 and back (ALISE §3.2).
performing.py   Performs the orders of forms on a worker's engine.
"""
