"""The lab beside the product: what is simulated, fuzzed, planned, reproduced and measured.

It imports the package; the package never imports the lab, but its command line finds the lab's commands by name.

    api/         simulated runs from Python
    cli/         the lab's commands
    trials/      what users ask to be simulated: built, run, side by side
    devices/     GPUs and models whose steps were measured or are computed
    reports/     figures, tables and plots of runs
    planning/    the cheapest deployment that keeps its promises
    fuzzing/     faults from seeds, and what must hold
    reproduce/   the papers' figures, run again
    benchmarks/  measurements behind our claims

    processes.py  processes that share a piece of work
"""
