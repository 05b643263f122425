"""Weights on their way from trainers to generation servers: versioned, in pieces, checked."""
