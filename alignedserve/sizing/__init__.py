"""Size a deployment before anything is loaded: which device, how much KV, and whether it fits in memory.

accelerator.py   What `engine.device: auto` stands for: the GPUs that torch sees, else the CPU.
adapters.py      The adapters (LoRA) that a deployment begins with, and the memory for all that it serves.
capacity.py      How many blocks and pages the given memory holds, and the longest request.
claims.py        What running deployments may still take of this machine's memory.
memory.py        Check that weights, KV and a step's work fit into memory before anything is loaded.
model_folder.py  The folder of the model that a configuration names, and where random weights will do.
sizes.py         Decide the sizes that nobody named, once, before anything is loaded; all parts then read numbers.
"""
