"""A run's state on disk and behind URLs."""
