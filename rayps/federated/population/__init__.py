"""The clients' world on a virtual clock: who is there, who replies, and when. Pure functions of the seed."""
