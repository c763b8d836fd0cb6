"""The command line: one file per command (in remote/ those that talk to a server); flags import nothing heavy.

clients.py        the commands that talk to a server or look after its store, and their flags
completion.py     `alignedserve completion`: scripts by which shells complete commands and flags
doctor.py         `alignedserve doctor`: what this machine has for serving, what it lacks, and how to get that
foreign.py        what people type who know vLLM, llama.cpp or Ollama, and what says the same here
main.py           the entry: parses the command line, runs the command, reports errors in one line
plotting.py       makes and saves matplotlib's figures, where it is installed
profile.py        `alignedserve profile`: measures what steps take here, and writes the cost model
serving.py        the flags of serve, presets, key, doctor and profile; prints the configuration
store.py          `alignedserve store`: checks the store of files and jobs, and exports its records
"""
