"""The memory of a decode worker that keeps some requests in other forms than KV in blocks of their own.

table.py        Which memory a policy asks for.
two_ended.py    Memory in which two requests may share a block (BROS §5).
block_ends.py   Blocks that two requests share: a real-time one from the left, a best-effort one from the right.
slot_copies.py  The copies of single tokens' vectors that are due before a step.
hybrid.py       Memory that keeps some requests as hidden vectors (Apt-Serve §4.3).
worth.py        What a request is best kept as: KV, hidden vectors, or nothing (Apt-Serve §4.2, §5).
"""
