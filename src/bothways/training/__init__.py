"""Training: the loop, optimizers, schedules, ranks, checkpoints and records. Knows no model."""
