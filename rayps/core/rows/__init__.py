"""Which rows which worker takes in which round. Pure."""
