"""Models larger than a worker: division, pipeline stages, tensor parallelism."""
