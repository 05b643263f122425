"""Job queries: one batched call to Slurm, parsing of its answer, and the meaning of states and reasons."""
