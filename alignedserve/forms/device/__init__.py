"""How an engine keeps requests in other forms than KV in blocks of their own, and pages of the pool than as KV.

checkpoints.py  Copies vectors of single tokens between slots of the device cache and the worker's memory.
hidden.py       Attention to hidden vectors, and K and V made of them.
int8_pages.py   Converts a full page of KV to int8 and back (ALISE §3.2).
pages.py        The forms that pages of the pool can have.
performing.py   Performs the orders of forms on a worker's engine.
table.py        The forms that an engine's model can have.
"""
