"""Clients that are processes outside of the cluster, with their own data: over HTTP, files and signed orders."""
