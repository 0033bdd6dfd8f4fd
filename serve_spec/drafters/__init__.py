"""Drafters: each proposes tokens for the rows that speculate. One file and one line each."""
