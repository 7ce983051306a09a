"""Strategies: one file per paper's algorithm. `rayps.strategies.catalogue` finds a strategy by its name."""
