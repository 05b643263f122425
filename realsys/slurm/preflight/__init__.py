"""Are the GPUs of a job's nodes healthy, and how fast: for `realsys doctor --gpu` and a job's start."""
