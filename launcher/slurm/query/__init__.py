"""What Slurm says of jobs: one batched question, its answer, and what states and reasons mean."""
