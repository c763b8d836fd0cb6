"""How an engine keeps requests in other forms than KV in block pairs of their own.

checkpoints.py  Copies vectors of single tokens between slots of the device cache and the worker's memory.
hidden.py       Attention to hidden vectors, and K and V made of them.
performing.py   Performs the orders of forms on a worker's engine.
table.py        The forms that an engine's model can have.
"""
