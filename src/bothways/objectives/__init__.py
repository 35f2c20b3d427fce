"""Objectives of pre-training as values, with their learners, and losses of fine-tuning."""
