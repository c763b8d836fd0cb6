"""KV that prefill workers hold for decode workers, copied there ahead of need (AlignedServe §3.2 and §3.4).

decode_part.py  A decode worker's part: what prefill workers are to hold, and requests that leave for prefill workers.
buffers.py      A prefill worker's part: the held KV, and how decode workers pull it.
"""
