"""Real federated clients: rayps's own trainer for the process of `rayps_client`."""
