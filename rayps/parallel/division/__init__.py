"""A copy of the model on several workers: the owner of each part, and what workers borrow each step."""
