"""The loop of each family of strategies."""
