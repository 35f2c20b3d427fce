"""Conversions of other models: checkpoints of TensorFlow, and BERT or RoBERTa to Longformer."""
