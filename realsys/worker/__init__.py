"""What every worker process does, whatever its kind."""
