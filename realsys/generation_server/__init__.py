"""The worker that serves generation requests."""
