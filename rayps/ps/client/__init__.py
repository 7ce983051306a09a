"""The worker's side of a server group: sends requests to the servers that hold the segments at present."""
