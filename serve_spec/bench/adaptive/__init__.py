"""`serve-spec bench adaptive`: policies against fixed depths."""
