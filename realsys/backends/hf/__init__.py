"""Engines over Hugging Face modules: sharding, loading, optimization, generation."""
