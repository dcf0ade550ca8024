"""What is right: FP8 formats, exact sums, recipes and error measures. Plain torch, runs anywhere."""
