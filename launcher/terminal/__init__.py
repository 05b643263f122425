"""What people and scripts see of a command: text on stdout and stderr, and the exit code."""
