"""Pictures of the dataflow graph and of a step's timeline."""
