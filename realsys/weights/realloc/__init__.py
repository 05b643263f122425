"""Weight reallocation: plans and executes the transfer from one copy of a model to another."""
