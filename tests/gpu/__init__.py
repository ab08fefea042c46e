"""What one NVIDIA GPU can show: skipped where there is none.

NCCL refuses two ranks on one GPU: several ranks are threads. One card shows neither NCCL between
peers nor any speed.
"""

from functools import reduce

import pytest
import torch

DEVICE = "cuda"  # with "cpu" here the same tests run without a GPU, to see that they run
ON_GPU = [
    pytest.mark.ranks,
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
    ),
]


def on_gpu(test):
    """``test`` with all of `ON_GPU`."""
    return reduce(lambda marked, mark: mark(marked), ON_GPU, test)
