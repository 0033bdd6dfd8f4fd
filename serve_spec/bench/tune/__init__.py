"""`serve-spec tune`: how to speculate with a pair, measured."""
