"""Coordinates the jobs of a trial whose groups are in several Slurm jobs (layout split)."""
