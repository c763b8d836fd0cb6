"""Access to a deployment: API keys, what each caller has used, and what other machines can reach.

adapters.py     The adapters (LoRA) that clients may choose, which all gateways and the job runner share.
budgets.py      The tokens that each key has used in this day and this month, for the budgets of keys.
exposure.py     Checks before a start who can reach the deployment, with which keys, and whether by TLS.
keys.py         API keys say which caller sends a request, what the caller may ask for, and how much.
ledger.py       Counts what each caller used lately, in memory that all gateways share.
shared_bound.py A bound on what callers hold together of a gateway, which leaves each of them room.
"""
