"""Read the weights of models from files, each format in a file of its own; or make random ones.

awq.py                 AWQ: 4 bits, packed by outputs.
compressed_tensors.py  compressed-tensors: whole numbers of 8 or 4 bits, packed by inputs or a byte each.
dummy.py               Random weights in place of those of files.
float8.py              8-bit floats, taken as they are or expanded while they are read.
forms.py               Chooses how the weights of a folder are read.
gguf_blocks.py         Quantised weights from the blocks of GGUF files.
gguf_weights.py        Reads the tensors of a GGUF file.
gptq.py                GPTQ: 4 or 8 bits, packed by inputs, which may have an order of their own.
mxfp4.py               MXFP4: experts in floats of 4 bits, expanded while they are read.
packed.py              Numbers of 4 or 8 bits that lie in words of 32; the part of a weight that a rank has.
stacked.py             Experts that the files have stacked into one tensor, as layers of their own.
tensors.py             Reads the tensors of a Hugging Face model folder.
"""
