"""An algorithm from outside the package, as a user would write it."""

from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.comm.communicator import ReduceOp


class LocalSGD(Algorithm):
    """Every rank steps by itself; every ``every`` steps parameters are averaged (Stich 2019)."""

    def __init__(self, every):
        self.every = every
        self.num_steps = 0

    def attach(self, module, optimizers, comm, *_):
        self.module, self.comm = module, comm

    def after_step(self, optimizer):
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            flat = parameters_to_vector(self.module.parameters()).detach()
            self.comm.all_reduce_(flat, op=ReduceOp.AVG).wait()
            vector_to_parameters(flat, self.module.parameters())

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]
        return ""
