"""The Ray Serve application, its deployments, and the command that serves it."""
