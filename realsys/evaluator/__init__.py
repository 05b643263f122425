"""Evaluates saved checkpoints: a worker during training (build.py), and one model by itself (saved_model.py)."""
