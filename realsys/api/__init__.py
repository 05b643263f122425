"""The vocabulary: scheduling, experiments, dataflow, models, data, plans, errors, registries. No torch."""
