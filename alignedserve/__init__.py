"""AlignedServe: one serving system for real-time chat and best-effort documents on the same GPUs.

__main__.py  `python -m alignedserve`, and the script `alignedserve`.
core.py      The nouns that every part shares. Only the standard library is imported here.
errors.py    Every error that AlignedServe raises on purpose.
"""
