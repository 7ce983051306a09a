"""Comparisons of algorithms by what they learn."""
