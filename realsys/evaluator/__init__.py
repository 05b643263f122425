"""The worker that evaluates saved checkpoints beside the training."""
