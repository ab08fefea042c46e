"""Who takes part in a job whose ranks come and go. Without torch."""
