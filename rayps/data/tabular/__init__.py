"""Rows of tables."""
