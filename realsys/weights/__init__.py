"""Weight transfer: between parallel layouts of a model, and from trainers to generation servers."""
