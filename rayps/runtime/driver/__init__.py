"""The driver: it starts a job's workers, watches them, and decides what follows a failure."""
