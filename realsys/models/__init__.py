"""Loading and saving Hugging Face models, and checks of their directories."""
