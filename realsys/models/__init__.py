"""Modules: Hugging Face in and out, small models from scratch."""
