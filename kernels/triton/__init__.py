"""Kernels in Triton for GPUs.

adapters.py   Adds to a linear layer what its adapters change, in Triton.
attention.py  Attention over paged blocks, in Triton.
copies.py     Copies between the device and pages, and int8, in Triton.
decoder.py    Run all layers of a decoder with fewer launches.
experts.py    The experts of a mixture, all at once, in Triton: nobody waits to learn which experts run.
few_rows.py   Products of one to eight rows, with what lies before and behind them.
kernels.py    The Triton kernels behind dispatcher.py's interface; torch fills in the rest.
latent.py     Attention to compressed vectors, in Triton.
launch.py     Shared by all Triton kernels: how they are tuned, and what versions and the interpreter change.
pieces.py     What all attention in Triton shares: pieces, places in blocks, weights, partial results.
products.py   Products with quantised weights, in Triton: 4 and 8 bits, and rows as whole numbers.
sampling.py   Draw tokens from logits, and log-probabilities, in Triton; the CPU never waits.
schedule.py   Cut attention into pieces of about equal length, which a GPU computes side by side.
sums.py       Sum the parts of all ranks, add the sum to the residual, and write its norm, in one kernel.
tokens.py     Norms, rotation and activation of each token, in Triton.
"""
