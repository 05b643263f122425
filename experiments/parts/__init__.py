"""Building blocks of experiments: settings, calls, placement, checks."""
