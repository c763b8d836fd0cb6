"""Load tests of any server that has OpenAI's HTTP API: `alignedserve bench`.

The requests are a workload's, as in the simulator; what came of them is a run's record, as of a simulated run. So one
load is simulated and measured by the same words, and figures follow from both by the same code.

answer.py       reads a streamed answer: when each token came
connections.py  connections to the server, which note the time as soon as bytes are there
core.py         says which request is asked next, and records what came of each
disclosures.py  the nine facts that a public suite has every report disclose
job.py          best-effort requests as the lines of a batch job
page.py         draws runs as one page of HTML
player.py       plays a load: tells the core what has happened, and does what the core orders
report.py       runs as a table, as CSV, and as JSON from which all figures follow
wording.py      writes the prompts of a workload as token ids or as messages
"""
