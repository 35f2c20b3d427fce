"""The only training loop, and what stands around it: optimiser, schedule, ranks, checkpoints, records."""
