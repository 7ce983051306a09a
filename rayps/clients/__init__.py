"""Real federated clients: the process that trains outside of the cluster, and its folder."""
