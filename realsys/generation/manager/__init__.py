"""Worker that routes generation requests to servers and updates their weights."""
