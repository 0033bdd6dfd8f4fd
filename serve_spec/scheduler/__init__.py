"""Which sequences run this round, and what a finished round means for them. Host only."""
