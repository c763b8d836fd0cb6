"""Read the weights of models from files, in each of their formats, or make random ones.

dummy.py               Random weights in place of those of files.
forms.py               The forms in which folders keep quantised weights, and which of them a folder has.
gguf_weights.py        Reads the tensors of a GGUF file: quantised weights from its blocks.
packed.py              Numbers of 4 or 8 bits that lie in words of 32; the part of a weight that a rank has.
stacked.py             Experts that the files have stacked into one tensor, as layers of their own.
tensors.py             Reads the tensors of a Hugging Face model folder.
"""
