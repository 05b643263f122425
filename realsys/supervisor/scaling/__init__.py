"""Adds workers to a live run and drains those that are to leave."""
