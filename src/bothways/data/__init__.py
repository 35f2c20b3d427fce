"""From documents to batches: readers, corpora in shards, masks, mixtures, labelled tables."""
