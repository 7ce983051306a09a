"""The routes of the REST interface."""
