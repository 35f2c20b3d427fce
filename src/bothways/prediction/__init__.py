"""Predictors: prepared models in fp32, bf16 or int8, and exported graphs, for every task."""
