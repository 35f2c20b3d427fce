"""Checks that run before anything long: of the text and the tokenizer, and of the machine."""
