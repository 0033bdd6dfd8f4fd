"""What several rooms' tests share: tiny random checkpoints, written in milliseconds."""
