"""Benchmarks of communication, training steps and the job service, for `rayps bench`."""
