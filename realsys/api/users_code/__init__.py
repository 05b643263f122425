"""Reads what a user's code gives and raises. The standard library alone: hosts load these files by path."""
