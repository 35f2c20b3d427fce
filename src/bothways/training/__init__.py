"""The only training loop, and what stands around it: optimizer, schedule, ranks, checkpoints, records."""
