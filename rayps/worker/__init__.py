"""One worker's part of a run: the methods that all families of strategies need (`core`), and a loop for each family."""
