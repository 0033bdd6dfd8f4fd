"""`serve-spec bench parallel`: several GPUs."""
