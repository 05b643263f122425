"""How torch computes in a process of ours: the settings that belong to its device."""
