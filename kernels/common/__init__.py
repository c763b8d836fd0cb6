"""What all kernels share: the torch reference, shapes, and linear layers.

best_first.py       The likeliest tokens of rows of logits, in order: without sorting what cannot be among them.
decoder.py          Layers of a decoder whose norms come before attention and MLP: described for kernels that
drawing.py          A token of each row of logits, and log-probabilities: what they mean, in torch.
failing.py          When a kernel fails as it runs: another takes its place, unless the fault is not its own.
linear.py           Linear layers: for each shape and number of rows, the faster of our kernel and torch.
placing.py          How what the CPU has made for a step reaches the device.
reference.py        What every kernel means, in plain torch: the fastest kernels are tested against these, and
row_blocks.py       Rows over a vocabulary, read by blocks of columns: sums, maxima and places that touch each
spans.py            Where the tokens of a step's requests lie on the device: made once for a step, read by
static_spans.py     Spans for steps that are captured once and replayed: so many requests with one token each,
threads.py          The threads that torch and the kernels share. docs/how/kernels.md says what follows from that.
"""
