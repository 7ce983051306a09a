"""A server of a server group: one thread serves segments of many spaces, and keeps backups of them on other servers."""
