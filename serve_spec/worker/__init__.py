"""One rank: target, drafter and verdict, composed into the execution of a plan."""
