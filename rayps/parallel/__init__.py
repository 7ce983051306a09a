"""Models too large for one worker: their division among several, pipeline stages, tensor parallelism."""
