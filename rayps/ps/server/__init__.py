"""A server of an elastic group: one thread serves segments of many spaces, with backups on other servers."""
