"""Runs an agent's commands in the box of a Harbor task, then the task's tests, and reads their reward."""
