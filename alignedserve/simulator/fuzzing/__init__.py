"""The fuzzer: drawn scenarios, invariants, recordings and their replays.

fuzz.py              One scenario tried: a run under watch, and the verdict on it.
invariants.py        What must hold in a simulated run, and when that is looked at.
recording.py         Runs as files, and the first difference of two of them.
scenario.py          A small deployment, what it is asked and what goes wrong in it.
scenario_drawing.py  Scenarios from seeds: most are small and crowded, since that is where cores go wrong.
shrink.py            A failing scenario made smaller, as long as it fails by the same rule.
typed_tree.py        Dataclasses from the trees that JSON gives, by their own types: what is wrong is named,
"""
