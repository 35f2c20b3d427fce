"""Objectives of pre-training as values, with their training modules, and losses of fine-tuning."""
