"""Loading and saving Hugging Face models, checks of their directories, and small models from scratch."""
