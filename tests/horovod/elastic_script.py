"""A script for elastic Horovod, which names it: ``elastic_script.py FOLDER SIZE DEATHS``.

DEATHS are ``NUMBER:EPOCH:BATCH``: process NUMBER kills itself after the backward of that batch.
Each process that is left writes NUMBER.json. The last epoch begins with SIZE ranks.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

EPOCHS, SAMPLES, BATCH = 2, 48, 2
folder, size, *deaths = sys.argv[1:]
number = os.environ["RING_MEMBER"]
errors = []
resets = []

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(int(number))  # rank 0's weights count
data = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, used=[], sampler=sampler)
state.register_reset_callbacks([lambda: resets.append((hvd.rank(), hvd.size()))])


def step(state, part):
    optimizer.zero_grad()
    model(data[part]).pow(2).mean().backward()
    if f"{number}:{state.epoch}:{state.batch}" in deaths:
        Path(folder, "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    used = hvd.allgather_object(part, name="used")
    state.used = state.used + [(state.epoch, index) for one in used for index in one]
    state.sampler.record_batch(state.batch, len(part))
    state.batch += 1


@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        while state.epoch == EPOCHS - 1 and not state.batch and hvd.size() != int(size):
            state.check_host_updates()
            time.sleep(0.05)
        indices = list(state.sampler)
        for begin in range(0, len(indices), BATCH):
            try:
                step(state, indices[begin : begin + BATCH])
            except hvd.HorovodInternalError as error:
                errors.append((type(error).__name__, time.time()))
                raise
            state.commit()
        state.epoch, state.batch = state.epoch + 1, 0
        state.sampler.set_epoch(state.epoch)
    return "trained"


result = {
    "result": train(state),
    "weights": model.weight.tolist(),
    "used": sorted(state.used),
    "errors": errors,
}
result["momentum"] = optimizer.state_dict()["state"][0]["momentum_buffer"].tolist()
result |= {
    "resets": resets,
    "size": hvd.size(),
    "sum": hvd.allreduce(torch.ones(1), op=hvd.Sum).item(),
}
Path(folder, f"{number}.json").write_text(json.dumps(result))
