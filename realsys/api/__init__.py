"""Contracts shared by all rooms: scheduling, experiments, dataflow, models, data, plans, errors,
registries. No torch.
"""
