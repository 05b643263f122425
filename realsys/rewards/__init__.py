"""Rules that score an answer."""
