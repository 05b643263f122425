"""Rules that score an answer, by name."""
