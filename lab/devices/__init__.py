"""The devices of simulated workers: how long their steps and copies take, and what they hold.

device_file.py Reads what users write of a device: its numbers, or grids that they measured.
devices.py     Keeps the sizes and speeds of GPUs and models, and their names.
gpu_truth.py   Computes from grids how long a step takes on a GPU.
hardware.py    Describes a worker's device: how long steps and copies take, and how much memory it has.
roofline.py    Computes grids for GPUs that nobody measured, from data sheets.
profiles/      Grids of measured GPU times.
"""
