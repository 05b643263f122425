"""The master's part of asynchronous runs: dispatches prompts, collects experience, updates the servers'
weights."""
