"""One worker's part of a run: the verbs that every family of strategies needs (`core`), and a loop for each family."""
