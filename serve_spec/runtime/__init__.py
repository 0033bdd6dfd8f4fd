"""One model on one rank: batch layout, forward, and the per-tier runtime state."""
