"""`hvd.elastic`: a training that goes on when ranks die or come (``ringrun --min-ranks``)."""

from lightning_ring.errors import HorovodInternalError, HostsUpdatedInterrupt
from lightning_ring.horovod.elastic.run import run, run_fn
from lightning_ring.horovod.elastic.sampler import ElasticSampler
from lightning_ring.horovod.elastic.state import ObjectState, State, TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
    "run_fn",
]
