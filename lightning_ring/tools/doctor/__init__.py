"""``lightning-ring doctor``: checks that ranks can start, meet and exchange gradients.

Questions that may break or hang (torch, MPI, the driver, other hosts) run in other processes with a
time limit, so that the doctor itself always ends.
"""
