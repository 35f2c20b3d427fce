"""Foundations: the packed layout, batches, losses, keyed randomness, configuration and errors."""
