"""The side process of the router, which learns from past prompts and predicts lengths.

frames.py   frames in the pipes between the router and the side process
hands.py    sends the core's orders to the side process
process.py  the side process itself
"""
