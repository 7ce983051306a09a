"""Measurements of parameter servers and tables."""
