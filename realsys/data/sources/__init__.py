"""Built-in data sets."""
