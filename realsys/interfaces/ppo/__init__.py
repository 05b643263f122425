"""A policy trained by its own answers, with a critic or without."""
