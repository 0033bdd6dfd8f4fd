"""What is seen of the fleet: reports of replicas, metrics, the status page."""
