"""From target logits and drafts to the tokens a round emits."""
