"""What can be asked for by name; apart, so that a command line is read without importing torch."""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
BACKENDS = ("auto", "mpi", "gloo", "nccl", "torch-gloo", "torch-nccl")
COPY = "copy"  # measured beside them: each rank copies the tensor once, all at the same time
