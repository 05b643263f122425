"""What is asked of Slurm for a trial: who shares nodes, who sits where, within which limits. Pure."""
