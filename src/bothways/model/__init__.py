"""One bidirectional encoder over packed tokens, and the heads that read it."""
