"""A trial whose groups sit in several Slurm jobs (layout split): how the jobs coordinate."""
