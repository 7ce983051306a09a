"""Processes of real federated clients."""
