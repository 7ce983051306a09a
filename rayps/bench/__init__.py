"""How fast the data plane is, beside named peers, by commands."""
