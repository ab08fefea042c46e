"""How a training goes on when ranks die or come.

1. Every step remembers buffers and random generators. It computes gradients and averages, passes
   the commit barrier, and steps the optimizers.
2. Any collective raises when the view is over. The member's thread breaks the communicator: waits
   in shared memory ask every 20 ms, and Gloo's sockets are shut down. Before a rank reports, its
   queue has let go of every step under way, so that it writes into no other rank's memory.
3. If the others have finished the step, or all can, the rank steps its optimizers with the averages
   that it holds. Otherwise it does the step again, from the same position in the data with the new
   ranks. Survivors therefore end with the bits of a fresh job of as many ranks, started from that
   state.
4. Newcomers get model, optimizer state and other parts from rank 0, between two steps, or have
   caught up before (`catch_up`). Until a newcomer has finished its first step, an error of its own
   counts as its death.

An error while no rank has died is raised as it is: calls that diverged would diverge again.

``Sharded`` goes on with mirrors (`algorithms.sharded.mirrors`). Before the commit barrier each rank
gets the averaged gradients of the rank before it, and can step its own shard and that mirror alone.
A shard then comes from its rank, or else from its mirror. If both are lost, the ranks tell the
steward the newest checkpoint and end, and new processes start from it.
"""
