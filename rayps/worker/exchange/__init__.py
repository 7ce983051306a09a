"""How a step's values travel."""
