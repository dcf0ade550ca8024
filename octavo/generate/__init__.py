"""`octavo generate`: completions of many prompts, into a file that survives being stopped."""
