"""Measurements of a GPU beside this machine's CPU."""
