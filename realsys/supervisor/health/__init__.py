"""Detects lost and stalled workers, finds the first failure, and restarts what may be restarted."""
