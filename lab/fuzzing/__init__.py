"""The fuzzer: it draws scenarios, checks invariants, and records and replays runs.

fuzz.py              Runs one scenario under watch and returns the verdict.
invariants.py        Checks the invariants of a simulated run while it runs.
recording.py         Writes runs to files and finds the first difference of two files.
scenario.py          Describes a small deployment, with requests and faults.
scenario_drawing.py  Draws scenarios from seeds: most are small and crowded, where cores fail most.
shrink.py            Makes a failing scenario smaller while it still breaks the same rule.
typed_tree.py        Builds dataclasses from JSON trees and names a wrong key.
waste.py             Checks that a run wastes nothing: attempts, outputs, pages.
wider_drawing.py     Widens scenarios: presets, switches, many workers, several nodes.
worker_views.py      What a worker's core has, as the fuzzer and tests look at it.
"""
