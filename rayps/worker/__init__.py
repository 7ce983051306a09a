"""One worker's part of a run: what every family of strategies needs (`core`), and one loop per family (`families`)."""
