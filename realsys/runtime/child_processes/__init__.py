"""Processes that end with the one that started them, and everything that they have started."""
