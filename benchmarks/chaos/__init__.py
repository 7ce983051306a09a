"""Measurements of what injected faults cost, which need the package rayps-chaos."""
