"""Measurements of sparse tables."""
