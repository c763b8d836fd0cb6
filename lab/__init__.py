"""The lab beside the product: what is simulated, put under load, fuzzed, planned, reproduced and measured.

It imports the package; the package never imports the lab, but its command line finds the lab's commands by name.

    api/         simulated runs from Python
    bench/       load tests of any server
    cli/         the lab's commands
    trials/      what users ask to be simulated: built, run, side by side
    loads/       workloads, records of requests, and the figures made from records
    simulator/   the same cores under a virtual clock, with a modelled engine
    devices/     GPUs and models whose steps were measured or are computed
    reports/     figures, tables and plots of runs
    planning/    the cheapest deployment that keeps its promises
    fuzzing/     faults from seeds, and what must hold
    reproduce/   the papers' figures, run again
    benchmarks/  measurements behind our claims

    processes.py  processes that share a piece of work
"""
