"""Who takes part in a job whose ranks come and go. Without torch.

- A steward decides: a loop in the process that started the ranks. It runs no torch and is no rank,
  so that it outlives any of them. It also serves the store through which the ranks meet. Its death
  ends the job.
- A view is a generation with its members, by rank. It ends when a member dies, or when its members
  stop at the end of a step because newcomers wait. Each remaining member then reports the steps
  that it has finished, and whether it holds the complete averages of the next one.
- A finished step is never lost. Ranks pass a commit barrier between the averages and the
  optimizer's step. When one of them has finished a step, all others can finish it too
  (`agreement`).
- Removed processes are fenced: the next view waits until each was killed and is on its way out of
  the kernel, because it might still write into memory of the others.
- Silence is bounded (`silence`). The steward asks each member every second. Time in which the
  steward itself was stopped does not count.
- A rank announces that it has finished. Exit code 0 before that is a failure, a signal is a death,
  any other exit code ends the job unless the process had never taken part.
- A request to the store carries its generation. A late one of an earlier generation is refused.
"""
