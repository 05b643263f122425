"""What is computed: PPO, SFT, rewards."""
