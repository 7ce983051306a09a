"""A copy of the model on several workers: who owns which part of it, and what is lent and given back each step."""
