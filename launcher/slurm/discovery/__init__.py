"""A site file drafted from what Slurm reports about itself, for `realsys clusters init`."""
