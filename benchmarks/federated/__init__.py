"""Federated rounds and clients beside other systems."""
