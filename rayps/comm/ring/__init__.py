"""Collectives and transfers of tensors between the ranks of one generation."""

from rayps.comm.ring.ring import Ring

__all__ = ["Ring"]
