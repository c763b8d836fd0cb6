"""The KV pool: the memory of a node in which KV waits for its decode worker, and who owns which page of it."""
