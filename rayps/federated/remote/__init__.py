"""Real clients, which are processes outside of the cluster: the folder for their messages, signed orders, options."""
