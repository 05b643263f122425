"""Programs that run users' agents in an interpreter of their own. They import nothing of ours."""
