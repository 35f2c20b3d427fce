"""The cleaning steps of a corpus: rules for lines and documents, and near-duplicates."""
