"""Tasks as values: what a model is used for, its examples, losses, predictions and metrics."""
