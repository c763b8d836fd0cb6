"""Tools with which schedulers choose what a worker's next step runs, the same on prefill and decode workers.

view.py             What a scheduler sees of its worker, and what it answers. Begin here.
step_builder.py     Puts a step together, and counts the time, tokens, seats and memory that it has left.
seating.py          The block pairs of a device, and the seats for prompts that wait, that a step may take.
waiting_prompts.py  Prompts that wait for room, kept in the order in which they are to be served.
lines.py            The order of waiting prompts: by arrival, by a fixed key, or by promises.
decode_order.py     Decodes in their order, kept where there are more than a step has places for.
ranks.py            Seated requests, in the order in which a step serves them.
arrival_forecast.py Chats that are still to come: a step must not cost them their first token.
running.py          A request on a worker, and the block pairs of a device.
device_pages.py     What a device has of the beginnings of requests, which share it.
named_blocks.py     Block pairs whose full pages have names, and several readers.
"""
