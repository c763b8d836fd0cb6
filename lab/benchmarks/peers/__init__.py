"""Other engines and servers, in Pythons of their own or as programs.

llama_cpp.py    llama.cpp's programs
vllm_client.py  vLLM's load test, as a client
vllm_server.py  vLLM's HTTP server, with an engine that only counts
vllm_steps.py   steps of vLLM's engine
"""
