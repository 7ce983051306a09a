"""The worker's side of the parameter server: sends each request to the servers that now hold its segments."""
