"""Tasks: problems with answers that a program can check, and the score that becomes the reward."""
