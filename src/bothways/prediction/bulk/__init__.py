"""Predictions for many files: parts in processes, resumed where they stopped."""
