"""Pipeline parallelism: cut a model into stages, and run each stage on its worker by a schedule."""
