"""The worker that evaluates saved checkpoints during training."""
