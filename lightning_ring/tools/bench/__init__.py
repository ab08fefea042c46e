"""The names that a command line may use; importing them needs no torch."""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
BACKENDS = ("auto", "mpi", "gloo", "nccl", "torch-gloo", "torch-nccl")
MOST_RESIDUAL = 0.5  # of a fit that is believed
COPY = "copy"  # measured beside them: each rank copies the tensor once, all at the same time
