"""`serve-spec bench online`: load through HTTP."""
