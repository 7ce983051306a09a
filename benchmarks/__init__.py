"""Compare rayps with other libraries, and draw the documentation's figures: `python -m benchmarks`.

This package is not part of the wheel.
"""
