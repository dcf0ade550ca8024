"""What a run or a config looks like: pages and figures for people."""
