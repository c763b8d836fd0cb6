"""Tools with which schedulers choose what a worker's next step runs, the same on prefill and decode workers.

view.py             What a scheduler sees of its worker, and what it answers. Begin here.
step_builder.py     Puts a step together, and counts the time, tokens, seats and memory that it has left.
waiting_prompts.py  Prompts that wait for room, kept in the order in which they are to be served.
ranks.py            Seated requests in the order in which a step serves them; kept where a step has places for fewer.
states.py           The states of a request on a worker, and the transitions between them.
request.py          A request on a worker.
blocks.py           The blocks of a device: free ones, the ones shared by name, and the ones of a request.
device_pages.py     What a device has of the beginnings of requests, which share it.
"""
