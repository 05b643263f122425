"""Built-in model interfaces: PPO, SFT, rewards."""
