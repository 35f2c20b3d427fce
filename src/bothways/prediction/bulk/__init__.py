"""Predictions for many files: parts in processes or on a cluster, resumed where they stopped."""
