"""RL post-training on Slurm: the runtime (see docs/architecture.md)."""

__version__ = "0.2.0"
