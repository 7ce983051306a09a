"""A server of an elastic group: segments of many spaces, copies on other servers, one thread."""
