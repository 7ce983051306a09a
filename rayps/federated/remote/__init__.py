"""Clients that are processes outside of the cluster, with data of their own: by HTTP, files and signed orders."""
