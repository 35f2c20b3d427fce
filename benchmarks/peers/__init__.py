"""Training with transformers' Trainer, one file per kind of task."""
