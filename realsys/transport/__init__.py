"""Small typed control messages between processes; no tensors."""
