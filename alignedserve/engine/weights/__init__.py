"""Read the weights of models from files, in each of their formats, or make random ones.

adapters.py            The linear layers that adapters may change, and the adapters that are kept.
dummy.py               Random weights in place of those of files.
forms.py               The forms in which folders keep quantised weights, and which of them a folder has.
gguf_weights.py        Reads the tensors of a GGUF file: quantised weights from its blocks.
packed.py              Numbers of 4 or 8 bits that lie in words of 32; the part of a weight that a rank has.
tensors.py             Reads the tensors of a Hugging Face model folder.
"""
