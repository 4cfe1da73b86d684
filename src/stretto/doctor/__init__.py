"""What a machine can do, and what is wrong with it."""
