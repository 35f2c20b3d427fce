"""Model folders in both directions: Hugging Face's files, our own format, the Hub, conversions."""
