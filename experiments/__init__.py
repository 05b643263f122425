"""One file, one runnable experiment."""
