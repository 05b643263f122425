"""The master's part of asynchronous runs: prompts out, experience in, weights to servers."""
