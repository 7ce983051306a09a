"""Measurements between hosts on slow links."""
