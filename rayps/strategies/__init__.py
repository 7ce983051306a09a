"""Strategies: one file per paper, found by name in `rayps.strategies.catalogue`."""
