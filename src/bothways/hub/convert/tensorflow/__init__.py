"""Google's checkpoints of BERT, ALBERT and ELECTRA, read without TensorFlow."""
