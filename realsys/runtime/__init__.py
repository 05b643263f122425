"""What processes of every kind share: system calls, ties to a parent, exit codes, progress, lifecycle."""
