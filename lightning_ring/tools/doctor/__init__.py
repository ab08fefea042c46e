"""``lightning-ring doctor``: is everything set up for ranks to start, meet and exchange gradients?

One file a family of checks. What may break or hang (torch, MPI, the driver, other hosts) is asked in other processes
with a time limit, so that the doctor itself always ends.
"""
