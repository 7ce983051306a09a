"""A client's own machine: folder, limits, schedule, the user's files."""
