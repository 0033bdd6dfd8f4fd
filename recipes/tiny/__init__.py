"""Recipe of the shipped pair: corpus, tokenizer and target; `serve-spec train` runs it."""
