"""Faults injected into a running job, and a check of what the job then left."""
