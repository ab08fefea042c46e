from __future__ import annotations

import pytest
import torch

from lightning_ring.monitor.ring_monitor import first_dimension


def test_batch_size_is_the_first_tensors_length() -> None:
    assert (
        first_dimension({"scale": torch.tensor(1.0), "images": [torch.ones(7, 3), torch.ones(9)]})
        == 7
    )
    with pytest.raises(TypeError, match="Give the callback batch_size="):
        first_dimension(["no", "tensor"])
