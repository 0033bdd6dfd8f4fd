"""Grammars: what a text may go on with, as masks over the vocabulary."""
