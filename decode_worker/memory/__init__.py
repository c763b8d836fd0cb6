"""The memory of a decode worker's device, behind one interface: plain, shared, or hybrid.

plain.py           The interface. As it stands it is plain: each block pair holds the KV of one request.
shared.py          Memory whose block pairs two requests may share (BROS §5).
blocks.py          Block pairs that two requests share: a real-time one from the left, a best-effort one from the right.
slot_copies.py     The copies of single tokens' vectors that are due before a step.
folding.py         Folds pairs of decodes that only layers without a window or stretches read any more.
hidden.py          Memory that keeps some requests as hidden vectors (Apt-Serve §4.3).
worth.py           What a request is best kept as: KV, hidden vectors, or nothing (Apt-Serve §4.2, §5).
packed_seating.py  What a choice may take of a device where real-time requests displace best-effort ones.
"""
