"""Federated learning: many clients, trained in turn on few workers, or real processes outside of the cluster."""
