"""Pack the steps of a decode worker: a file for each kind of packing, and the table of all of them.

packer.py    The interface of a packing. As it stands it is first come, first served.
table.py     The table of packings.
longest.py   AlignedServe's packing: the longest request leaves for lack of memory.
turns.py     Decodes take turns: real-time with best-effort requests, or decodes with prompts.
levels.py    By levels of service: the requests that were served least run first.
swapping.py  ALISE's packing: requests of lower levels are swapped out for requests of higher ones.
knapsack.py  Apt-Serve's packing: before each step it is chosen which requests have memory.
promises.py  BROS's packing: by promises; real-time requests displace best-effort ones.
crowding.py  Documents run less where chats fill the memory of the device.
own.py       The choice of a policy of one's own among the seated requests.
order.py     The order in which requests are served, and in which they leave for others.
ahead.py     Steps that are planned while the one before them runs.
"""
