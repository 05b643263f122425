"""Shared by all kinds of processes: system calls, ties to a parent, exit codes, progress,
lifecycle."""
