"""A Chrome trace of every rank's steps and collectives, for https://ui.perfetto.dev. Knows comm;
not Lightning.

The training thread appends to a queue. Every 0.2 s another thread makes events of it and writes
them to the rank's file, which can be read after ``kill -9``.

No rank leaves a barrier before all have arrived: the arrival of rank i and the departure of rank j
bound the difference of their clocks in every barrier. The tightest of 40 bounds are kept; half of
the remaining interval is the error. Ranks of the same boot differ by 0. The
trace's zero is rank 0's.

Starting and stopping are collective. In ``teardown``, which one rank may reach alone, a rank closes
its own file and asks no other rank.
"""
