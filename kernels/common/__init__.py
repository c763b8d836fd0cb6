"""Shared by all kernels: the torch reference, shapes, and linear layers.

adapters.py         Adapters (LoRA) as kernels read them: what each adds to linear layers, for its rows.
blocked.py          Quantised weights as GPU kernels read them, and linear layers of them.
decoder.py          Describe the layers of a decoder for kernels that run all of them at once.
drawing.py          Draw a token from each row of logits, and log-probabilities, in torch: the reference.
experts.py          The weights of a layer's experts for kernels that run all experts at once, and the same in torch.
failing.py          Replace a kernel that fails while it runs, unless the fault is not its own.
fp8.py              Weights of 8-bit floats, and linear layers of them by torch's scaled product.
int8_kv.py          K and V in int8, in plain torch.
linear.py           Linear layers: for each shape and number of rows, the faster of our kernel and torch.
peers.py            Memory of each rank that all ranks of a worker read and write, and how they meet there.
placing.py          Copy a step's inputs from the CPU to the device.
quantised.py        Weights of 8 or 4 bits with scales by groups of inputs, and linear layers of them.
reference.py        Every kernel in plain torch: faster kernels are tested against it.
scoring.py          How a layer scores tokens: scale, window, soft cap and sinks of its heads.
spans.py            Where the tokens of a step's requests lie on the device; made once per step.
summing.py          What stands between two products: the sum over ranks, the residual, and the norm.
threads.py          The threads that torch and the kernels share.
"""
