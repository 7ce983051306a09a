"""Where actors run: the protocol, threads for tests, Ray, placement, scratch folders."""
