"""Evaluates saved checkpoints: a worker during training (build.py), or one by itself (saved_model.py)."""
