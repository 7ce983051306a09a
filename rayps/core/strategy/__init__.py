"""What a strategy declares, and what follows from it. Pure."""
