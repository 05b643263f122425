"""The control plane: turns an experiment and a site into submitted work. No torch."""
