"""The worker's side of the parameter server. Each request is sent to the servers that hold its segments now."""
