"""Data types shared by all packages: requests, sequences, plans, step records."""
