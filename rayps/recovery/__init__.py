"""The state of dead workers: which worker holds whose backup, and how the state is restored."""
