"""The whole system in one thread: the cores that serve, under a virtual clock and with a modelled engine."""
