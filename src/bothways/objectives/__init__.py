"""What a model is pre-trained for: masked tokens, sentence pairs, and their sum."""
