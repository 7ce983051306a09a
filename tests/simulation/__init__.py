"""Deterministic simulation of rayps: the product's own code on a virtual clock, network and disk.

One thread runs everything, and one seed decides everything: equal seeds have equal traces. `kernel` has the clock, the
processes and their tasks; `network`, `cluster` and `disk` are what the product talks to; `substitutes` puts them in the
place of the modules that the product imports. `servers` and `service` are the scenarios, and `seeds` runs many seeds.
"""
