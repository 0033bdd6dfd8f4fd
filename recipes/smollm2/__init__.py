"""Recipe of the drafts for SmolLM2-135M-Instruct."""
