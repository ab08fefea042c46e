"""Losses between embeddings: one of pytorch-metric-learning, with its miner, and embeddings of
earlier batches.
"""

from typing import Any

from pytorch_metric_learning.losses import CrossBatchMemory
from torch import Tensor, nn

from lightning_ring.errors import ConfigurationError


class MetricLoss(nn.Module):
    """``loss`` of embeddings ``[batch, embedding_size]`` and labels ``[batch]``, over what
    ``miner`` selects.

    With ``memory`` each embedding is also compared with those of the last ``memory`` images,
    without gradients through them (Wang et al., "Cross-batch memory for embedding learning", CVPR
    2020). On several ranks the memory holds the images of all of them, and needs the batch of all
    of them.

    Args:
        loss: Of `pytorch_metric_learning.losses`, or called like them.
        miner: Of `pytorch_metric_learning.miners`; ``None``: the loss takes all pairs or triplets.
        memory: Images remembered; 0 for none.
        embedding_size: With ``memory``: length of an embedding.

    Raises:
        ConfigurationError: ``loss`` compares embeddings with weights of its own, so that a memory
            has no use.
    """

    def __init__(
        self,
        loss: nn.Module,
        miner: nn.Module | None = None,
        memory: int = 0,
        embedding_size: int | None = None,
    ) -> None:
        super().__init__()
        self.miner = None if memory else miner
        self.memory = memory
        if not memory:
            self.loss = loss
            return
        supported = CrossBatchMemory.supported_losses()
        if memory < 0 or embedding_size is None or type(loss).__name__ not in supported:
            raise ConfigurationError(
                f"memory={memory} and embedding_size={embedding_size} were given with "
                f"{type(loss).__name__}, expected a positive memory, an embedding_size, and a loss "
                f"between embeddings: {', '.join(supported)}."
            )
        self.loss = Memory(loss, embedding_size, memory, miner)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if self.memory and len(labels) > self.memory:
            raise ConfigurationError(
                f"a memory of {self.memory} images cannot hold the batch of {len(labels)}. Raise "
                "loss.memory."
            )
        mined = self.miner(embeddings, labels) if self.miner is not None else None
        return self.loss(embeddings, labels, mined)


class Memory(CrossBatchMemory):
    """`CrossBatchMemory` that a checkpoint holds whole: the library's leaves out how far its
    memory is filled.
    """

    def get_extra_state(self) -> dict[str, Any]:
        return {"next": self.queue_idx, "full": self.has_been_filled}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.queue_idx, self.has_been_filled = state["next"], state["full"]
