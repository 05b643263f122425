"""Output of a command: text on stdout and stderr, and the exit code."""
