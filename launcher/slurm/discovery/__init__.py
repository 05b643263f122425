"""Drafts a site file from Slurm's own configuration, for `realsys clusters init`."""
