"""Tokenizers: WordPiece, byte-level BPE and Unigram, their training, and templates of inputs."""
