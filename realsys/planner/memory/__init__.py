"""Memory of GPUs and hosts in bytes, term by term (pure)."""
