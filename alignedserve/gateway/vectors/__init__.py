"""Vectors of texts: embeddings, scores of pairs of texts, documents in the order of their relevance.

answers.py   Builds the answers of vectors: embeddings, scores, ranks.
requests.py  Makes Requests of a body that asks for vectors.
types.py     The bodies that ask for vectors: OpenAI's, vLLM's, Jina's and Cohere's fields.
"""
