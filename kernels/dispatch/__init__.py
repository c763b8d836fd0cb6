"""Which kernel runs where, measured and checked.

dispatcher.py       Choose the kernels that run: the fastest for this device, dtype and installation.
paged_attention.py  Attention by the fastest way: our Triton kernel, or another library where it fits.
paged_libraries.py  Attention of other libraries over paged blocks: FlashAttention 3, and flash-attn.
probing.py          Try each kernel and each library on a few numbers before anything depends on them.
rehearsing.py       Run kernels once on a GPU before the first step, so that Triton tunes them.
tuning.py           Measure at load which way is fastest for each linear layer and number of rows.
"""
