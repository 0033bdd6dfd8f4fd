"""One model on several devices: what its ranks exchange, and how they come and go."""
