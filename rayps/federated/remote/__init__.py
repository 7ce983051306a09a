"""Real clients, which are processes outside of the cluster: their files, signed orders and join options."""
