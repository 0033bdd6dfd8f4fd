"""Recipe of the shipped pair: corpus, tokenizer and target; `python -m recipes.train` runs it."""
