"""Simulate clients in virtual time: when they are available, which reply and when. Pure functions of the seed."""
