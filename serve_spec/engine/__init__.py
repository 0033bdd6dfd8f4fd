"""The engine of one process: scheduler, worker and controller, with its offline and async APIs."""
