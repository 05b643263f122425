"""Events, metrics, timeline, report."""
