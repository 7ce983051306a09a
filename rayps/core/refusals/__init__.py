"""What does not go together, each pair of features once: see `rayps.core.refusals.table`."""
