"""Which kernel runs where, measured and checked.

dispatcher.py       Which kernels run: the fastest that this device, dtype and installation have, and why.
paged_attention.py  Attention by whichever is the fastest: ours in Triton, or another library's where that
paged_libraries.py  Other people's attention over paged blocks: flash-attn, and torch's for sequences of any
probing.py          Tries each kernel, and other people's attention, on a few numbers before anything depends
rehearsing.py       Attention and sampling once, on a GPU, before the first step: on as much as a busy
tuning.py           Measures at load which way each linear layer goes fastest, for each number of rows.
"""
