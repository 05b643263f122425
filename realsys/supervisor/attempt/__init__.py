"""Claims the next attempt of a trial, and receives requests to stop it."""
