"""What others read and write: the Hugging Face model folder and the Hub."""
