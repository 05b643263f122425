"""Generation: the embedded engine."""
