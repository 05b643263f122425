"""Weights on the move: between layouts of a model, and from trainers to generation servers."""
