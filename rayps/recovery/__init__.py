"""The state of dead members: which worker holds a backup of whose state, and how it is restored."""
