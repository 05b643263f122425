"""Pure tensor functions, one paper reference each."""
