"""The decode worker: it decodes batches of requests, real-time and best-effort.

actor.py           The decode worker as a process.
ahead.py           Steps that are planned while the one before them runs, so that a device never waits for
band.py            Which batch runs on a decode worker, and who is about as long as its members (AlignedServe
blocks.py          Block pairs that two requests share: a real-time one from the left, a best-effort one from
candidates.py      Who is to join a decode worker as soon as there is room: its candidate requests, then its
evicting.py        Who has to leave a decode worker, to a prefill worker that can send its KV back
hybrid.py          What a request is kept as on the device: KV, hidden vectors, or nothing (Apt-Serve §4.2, §5).
hybrid_seating.py  Hidden vectors on the device, where who runs is decided already (Apt-Serve §4.3, under the
packing.py         Who of those that are seated runs in the next step, who is seated next, and who leaves for
pulling.py         What a decode worker does with its candidates (candidates.py): takes them, pulls their KV,
seats.py           Who has pairs on a decode worker, and how they come by them: joining, growing block by
sharing.py         Who runs and who joins where block pairs are shared (BROS §5, the memory ladder of
slot_copies.py     The copies of single tokens' vectors that are due before a step, collected while it is
state.py           The decode worker's core: fetches batches from the pool and decodes them; colocated, it
taking_in.py       Prompts that were run on a node without a pool, and find no seat here: they are taken in
to_pool.py         What a decode worker writes to the pool: who has to leave, and the answers of those that
"""
