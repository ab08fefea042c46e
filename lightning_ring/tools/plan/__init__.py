"""How far a job will scale, from a profile of one run and the cost of a message."""
