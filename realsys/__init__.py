"""RL post-training on Slurm: the runtime (see docs/architecture.md)."""
