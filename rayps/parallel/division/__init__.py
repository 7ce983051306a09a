"""The division of a model among several workers: the owner of each part, and what workers borrow each step."""
