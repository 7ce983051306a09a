"""The job service over HTTP: REST under /api/v1, one event stream, the dashboard. Jobs are run by `rayps.service`."""
