"""Rows of text."""
