"""The values and messages that workers, servers and the manager of a server group exchange."""
