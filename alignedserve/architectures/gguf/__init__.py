"""Read a GGUF file, llama.cpp's format of a whole model, as if it were a Hugging Face folder.

Code of our own reads it, since the gguf package makes arrays of each token: for a vocabulary of 150,000 it takes 35
times as long (docs/measured.md).

families.py    the architectures that are read, and the names and orders of their tensors
file.py        reads the metadata and the table of tensors
folder.py      makes the folder of a file, once, in the cache
places.py      the table of tensors that the folder keeps
tokenizer.py   tokenizer.json and its configuration from the file's metadata
"""
