"""Pages: who owns them (host), and the tensors they address (device)."""
