"""What a run leaves, and what looks at its results."""
