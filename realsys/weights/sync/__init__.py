"""Weights from trainers to generation servers: versioned, in buckets, checked."""
