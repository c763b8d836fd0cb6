"""Kernels in Triton for GPUs.

attention.py  Attention over paged blocks, in Triton: reference.py says what it means, triton_schedule.py what
copies.py     Between the device and pages, and int8, in Triton. A page is on the CPU: its vectors go and come
kernels.py    The Triton kernels behind the interface of dispatch.py; what they lack, torch does: linear
launch.py     What all Triton kernels share: how they are tuned, and what an interpreter changes.
sampling.py   Tokens drawn from logits, and log-probabilities, in Triton: drawing.py says what they mean. The
schedule.py   Which pieces of attention a GPU computes side by side: none much longer than the others, however
tokens.py     What is done to each token by itself, in Triton: a program for each vector, in fp32; rounded as
"""
