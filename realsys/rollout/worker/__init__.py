"""The worker that runs agents in environments and delivers what they did."""
