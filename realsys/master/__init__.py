"""The master worker: walks the dataflow graph, holds metadata only."""
