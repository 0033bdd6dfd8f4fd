"""What a router does with a request: admit it, choose its replica, send it, resume it."""
