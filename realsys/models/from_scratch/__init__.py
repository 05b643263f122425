"""Small models from scratch: random weights, and a tokenizer trained on the texts of a task."""
