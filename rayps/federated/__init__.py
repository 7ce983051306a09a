"""Federated learning: many clients, simulated one after another on few workers, or real processes elsewhere."""
