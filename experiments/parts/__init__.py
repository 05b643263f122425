"""What experiments are made of: settings, calls, placement, checks."""
