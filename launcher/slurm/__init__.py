"""The launcher's Slurm access: batch scripts, submission, job queries, site discovery and diagnosis."""
