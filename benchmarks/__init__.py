"""Comparisons with other libraries, and the documentation's figures: `python -m benchmarks`. Not part of the wheel."""
