"""Choose what a worker's next step runs, by the same rules on prefill and decode workers.

selection.py     Which decodes and prompt chunks run in a step. Begin here.
filling.py       A step that is being put together: what fits into what is left of its time, its tokens and memory.
limits.py        What a step may take: the tightest promise, the budget of prompt tokens; AccelGen's rules, and ours.
windows.py       Which prompt best fills what is left of a step: nearest in compute and memory (AccelGen §4.4).
seating.py       What a choice may take of a device: block pairs, and seats for requests that wait.
chunks.py        Which prompt tokens run first come, first served; and how a chunk is made.
waiting.py       Prompts that wait for room, kept in the order in which they are to be served.
lines.py         The order of waiting prompts: by arrival, by a fixed key, or by promises.
seated.py        Seated decodes, where there are more than a step has places for, kept in their order.
ranks.py         Seated requests, in the order in which a step serves them.
coming.py        Real-time requests that are still to come: a step must not cost them their first token.
running.py       A request on a worker, and the block pairs of a device.
device_pages.py  What a device has of the beginnings of requests, which share it.
named_blocks.py  Block pairs whose full pages have names, and several readers.
"""
