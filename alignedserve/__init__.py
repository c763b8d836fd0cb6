"""AlignedServe: real-time chat and best-effort documents on the same GPUs."""
