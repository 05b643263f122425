"""Search for the placement with the shortest predicted step."""
