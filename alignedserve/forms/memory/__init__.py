"""The memories of a decode worker that share blocks between requests, or keep some requests as hidden vectors.

two_ended.py    Memory in which two requests may share a block (BROS §5).
block_ends.py   Blocks that two requests share: a real-time request from the left, a best-effort request from the right.
hybrid.py       Memory that keeps some requests as hidden vectors (Apt-Serve §4.3).
worth.py        What a request is best kept as: KV, hidden vectors, or nothing (Apt-Serve §4.2, §5).
"""
