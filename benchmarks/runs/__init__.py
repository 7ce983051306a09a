"""Measurements of whole runs: starts, memory, mistakes."""
