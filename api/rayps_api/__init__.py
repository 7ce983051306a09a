"""The job service over HTTP: REST under /api/v1, one event stream, the dashboard. Jobs live in `rayps`."""
