"""Simulate clients in virtual time: when they are available, which of them reply, and when. Functions of the seed."""
