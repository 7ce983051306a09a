"""Federated learning: many clients in turn on few workers. Floor 0 where a module is pure, floor 3 where it trains."""
