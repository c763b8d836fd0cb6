"""The HTTP gateway: OpenAI's API in front, an owner of requests behind."""
