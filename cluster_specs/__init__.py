"""Site files: facts about clusters, as YAML."""
