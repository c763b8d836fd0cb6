"""Who may use a deployment: API keys, what each key has used, and what is open to whom.

exposure.py  Who can reach a deployment, and with what: checked before anything is started.
keys.py      API keys: who calls, what they may ask for, how much of it.
ledger.py    What each caller has had of late, in memory that all gateways of a deployment share.
"""
