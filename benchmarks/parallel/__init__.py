"""Pipelines and split layers beside torch's own."""
