"""How matrices are stored in checkpoints and in memory, and multiplied: one file per format."""
