"""Tensors of a run: flat vectors, optimizers on slices, learning rates, checkpoints, snapshots."""
