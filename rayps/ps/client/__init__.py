"""A worker's side of an elastic group: requests that find whoever holds a segment by now."""
