"""The rollout worker: runs agents in environments and delivers their trajectories."""
