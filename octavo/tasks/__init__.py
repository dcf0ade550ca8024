"""Tasks: problems with answers that a program can check, and the verdict that becomes the reward."""
