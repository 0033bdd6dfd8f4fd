"""The process: one scheduler, one worker, one controller, and the ways in."""
