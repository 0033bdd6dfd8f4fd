"""KV cache: page allocation and prefix cache (host), and the tensors that pages index (device)."""
