"""Collectives of the ranks of one node, in memory that they all map.

1. Each rank makes a file without a name (memfd_create), reserves its pages, and lets the others map
   it as /proc/PID/fd/N. The file ends with the last process that uses it, and the size of /dev/shm
   does not matter.
2. All ranks learn whether every rank succeeded. If one did not, the next backend is taken, with one
   warning. (At a container's memory limit the kernel may kill the rank instead.)
3. A rank that has written increments a counter in a cache line of its own, beside a digest of its
   call. A round is over once all counters have reached it. This relies on the order in which x86-64
   shows writes to other cores; other processors use MPI or Gloo.
4. Buckets are allocated in this memory. Each rank sums its shard of all ranks' buckets in pieces
   that fit the cache, and writes the result into all of them. Tensors elsewhere are copied through
   slots of 512 KiB.

A collective is a generator that yields the round it waits for (`comm.collective_queue`). The last
rank to call a long one runs it at once, unless the node has more cores than ranks. A collective
that no caller waits for is taken up after 1 ms by a thread that sleeps on a timerfd, and does not
take the interpreter's lock before.
"""
