"""Measure what this machine has, and check that its memory is enough.

accelerator.py   What `engine.device: auto` stands for: the GPUs that torch sees, else the CPU.
adapters.py      The adapters (LoRA) that a deployment begins with, and the memory for all that it serves.
capacity.py      How many block pairs and pages the given memory holds, and the longest request.
gpus.py          The memory of GPUs, as their driver tells it.
memory.py        Check that weights, KV and a step's work fit into memory before anything is loaded.
model_folder.py  The folder of the model that a configuration names, and where random weights will do.
one_thread.py    One compute thread, for work that has one core.
processes.py     Processes that share a piece of work.
resources.py     The cores, the memory and the open files that this process may use of its machine or container.
visible_gpus.py  The GPUs that torch sees, for a process of its own.
whole_file.py    Files that are there whole or not at all, and by one process at a time.
"""
