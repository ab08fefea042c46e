"""Reports on runs: one HTML page of what TensorBoard's event files and the run's folder hold."""
