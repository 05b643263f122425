"""Slurm knowledge shared by launcher and supervisor: grammars, srun commands, GPUs. Pure."""
