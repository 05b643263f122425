"""Before a run: memory and time of an allocation, predicted, and a search for a better one. No torch."""
