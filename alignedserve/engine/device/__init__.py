"""Devices of the engine: their memory, their groups and ranks, and the pace of copies.

devices.py      The device of an engine, a CPU or one GPU, and everything that only a GPU needs.
groups.py       Connections of two workers, over which KV travels.
large_pages.py  Memory for weights and KV in pages of 2 MiB, where the system provides them.
pace.py         The pace of copies beside the steps: full speed while no step runs, else few turns.
pinning.py      Registers the arena's mapping with CUDA, so that copies to and from a GPU need no stop.
rank_link.py    A connection of two ranks of a worker, over which frames go.
rank_store.py   What ranks tell each other to make NCCL's communicator.
ranks.py        The ranks of a worker: processes that share one model, each with a part of every layer.
shared_sums.py  Sums of ranks through each other's memory, where that is faster than NCCL.
"""
