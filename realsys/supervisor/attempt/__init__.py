"""Taking the next attempt of a trial, and learning that it is to stop."""
