"""The Slurm job of a trial: which groups share nodes, task placement and limits (pure)."""
