"""A model cut into stages, and the engine that runs them by a schedule."""
