"""The simulated clients in virtual time: availability, replies, times. Pure functions of the seed."""
