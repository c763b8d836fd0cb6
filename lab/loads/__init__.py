"""What load tests and the simulator share: workloads, records of requests, and the figures made from records.

defaults.py  the workload and the device of users who name none
"""
