"""Jobs as records, and the Ray that runs them: what the HTTP service stands on. No torch, no ray at import."""
