"""Which batches a worker computes."""
