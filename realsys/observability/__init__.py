"""What a run records: events, metrics, logs, history."""
