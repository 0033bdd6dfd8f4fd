"""`serve-spec breakeven`: should I speculate."""
