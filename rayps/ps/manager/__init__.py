"""The manager of an elastic group: who holds what, decided by pure functions, told by one thread."""
