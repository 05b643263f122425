"""Measures whether the GPUs of a job's nodes are healthy, and how fast: for `realsys doctor --gpu` and a
job's start."""
