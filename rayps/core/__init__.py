"""Pure values and decisions below all other folders: no torch, no ray."""
