"""Tools with which schedulers choose what a worker's next step runs, the same on prefill and decode workers.

view.py             What a scheduler sees of a worker, and what it answers. Begin here.
step_builder.py     Puts a step together, and counts the time, tokens, seats and memory left.
waiting_prompts.py  Prompts that wait for room, kept in the order of service.
ranks.py            Seated requests in the order of serviceer.
states.py           The states of a request on a worker, and the transitions between them.
context.py          The facts beside the requests that a plan depends on: the time, the cost model, the limits.
request.py          A request on a worker, also while it comes from elsewhere or leaves for another worker.
blocks.py           The blocks of a device: free blocks, blocks shared by name, and the blocks of a request.
seating.py          The memory and the seats that a step may take.
device_pages.py     The blocks of requests' beginnings on a device, which requests share.
"""
