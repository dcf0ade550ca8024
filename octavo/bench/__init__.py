"""Measurements on a GPU: times against a bound and against peers in the same run, and the files they leave."""
