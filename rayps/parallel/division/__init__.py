"""The division of a model among several workers: who owns which part, and which parameters they borrow per step."""
