"""The account of a private run."""
