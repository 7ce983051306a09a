"""Benchmarks of the data plane and the service, for `rayps bench`."""
