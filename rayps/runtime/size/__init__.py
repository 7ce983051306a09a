"""Changes of a job's workers, and of their shares of the rows."""
