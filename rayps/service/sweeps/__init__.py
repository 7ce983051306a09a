"""Sweeps, and the comparison of jobs."""
