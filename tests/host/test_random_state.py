"""The state of all random generators of a process."""

import torch

from lightning_ring.host.random_state import collect_random_state, restore_random_state


def test_a_state_that_is_a_view_is_restored():
    """Such as one rank's row of what was gathered: torch reads where the whole memory begins,
    and ends the process.
    """
    state = collect_random_state()
    expected = torch.rand(3)
    state["torch"] = torch.stack([torch.zeros_like(state["torch"]), state["torch"]])[1]
    restore_random_state(state)
    assert torch.equal(torch.rand(3), expected)
