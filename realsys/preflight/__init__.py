"""Are the GPUs of a job's nodes well, and how fast: for `realsys doctor --gpu`, and for a job's start."""
