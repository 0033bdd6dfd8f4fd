"""The nouns every room shares: requests, sequences, plans, batches. Data only."""
