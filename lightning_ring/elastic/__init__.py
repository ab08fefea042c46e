"""How a training goes on when ranks die or come. The steward and the membership need no torch.

Who takes part:

- A steward decides. It is a loop in the process that started the ranks, without torch, so that it
  outlives any of them. It also serves the store through which the ranks meet. Its death ends the
  job.
- A view is a generation with its members, by rank. It ends when a member dies, or between two steps
  because newcomers wait. Each remaining member then reports the steps that it has finished, and
  whether it holds the complete averages of the next one.
- Removed processes are fenced: the next view waits until each is dead, because it might still write
  into memory of the others.
- The steward asks each member every second. Time in which the steward itself was stopped does not
  count.
- A rank announces that it has finished. Exit code 0 before that is a failure, a signal is a death,
  any other exit code ends the job unless the process had never taken part.
- A request to the store carries its generation. Late ones are refused.

A death is survived in place:

1. Every step remembers buffers and random generators. It computes gradients and averages, passes
   the commit barrier, and steps the optimizers.
2. Any collective raises when the view is over. The member's thread breaks the communicator: waits
   in shared memory ask every 20 ms, and Gloo's sockets are shut down. Before a rank reports, its
   queue has dropped every step under way, so that it writes into no other rank's memory.
3. If the others have finished the step, or all can, the rank steps its optimizers with the averages
   that it holds. Otherwise it does the step again, from the same position in the data with the new
   ranks. So no finished step is lost, and survivors end with the bits of a fresh job of as many
   ranks.
4. An error while no rank has died is raised as it is: calls that diverged would diverge again.

A process joins between two steps. All ranks enter the training's loops again from one checkpoint
(`EnterAgain`), once all hold it: after a death meanwhile either all enter once more or nobody has
left. Until a newcomer has finished its first step, an error of its own counts as its death.

``Sharded`` uses mirrors (`algorithms.sharded.mirrors`): before the commit barrier each rank gets
the averaged gradients of the rank before it, and can step its own shard and that mirror alone. If a
rank and its mirror are both lost, all ranks enter the training again from the newest checkpoint on
disk.
"""
