"""The changes of the store's schema, oldest first."""
