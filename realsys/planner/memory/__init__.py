"""Bytes on GPUs and hosts, term by term (pure)."""
