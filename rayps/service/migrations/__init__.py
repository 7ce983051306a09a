"""The store's schema, one file per change; run by `rayps.service.store` when the service starts."""
