"""Rings between GPUs."""
