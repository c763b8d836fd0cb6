"""Devices of the engine: their memory, their groups and ranks, and the pace of copies.

devices.py      Where an engine computes: the CPU, or one GPU. What only a GPU asks for stands here, and costs
groups.py       Two-rank process groups of torch.distributed: who sends is rank 0, who receives is rank 1.
large_pages.py  Memory for weights and KV, which every step reads: in pages of 2 MiB where the system gives them.
memory.py       When a step has failed for want of memory, and when for another reason.
pace.py         How fast is copied beside the steps: as fast as it goes while there are none, else in turns
pinning.py      The arena's mapping, registered with CUDA: copies between pinned memory and a GPU need no stop
ranks.py        The ranks of a worker: processes that share one model, each with a part of every layer.
"""
