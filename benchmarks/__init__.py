"""Benchmarks beside peers, and figures of the documentation: `python -m benchmarks`. Not part of the wheel."""
