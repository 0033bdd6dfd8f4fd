"""Training room: the shipped target and every draft head, from Python source on the machine.

Order: corpus, tokenizer, target, rollout (on-policy text), the draft heads, evaluate, plot, export.
"""
