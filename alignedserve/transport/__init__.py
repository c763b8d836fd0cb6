"""How KV goes from one worker's device to another's without the pool's memory (docs/transfers.md)."""
