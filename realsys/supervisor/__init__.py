"""One supervisor per attempt: starts the workers, watches them, writes the exit marker."""
