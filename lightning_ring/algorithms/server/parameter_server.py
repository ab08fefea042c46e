"""Parameter servers: ranks push gradients to the servers' optimizer, and pull the weights.

Sources: Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014); Ho
    et al., "More
effective distributed ML via a stale synchronous parallel parameter server" (NIPS 2013); Zheng et
al., "Asynchronous stochastic gradient descent with delay compensation" (2017), arXiv:1609.08326,
equation 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Algorithm, log
from lightning_ring.algorithms.meeting import meet_for_pause, meet_to_stop
from lightning_ring.algorithms.server.serving import Serving
from lightning_ring.algorithms.server.stand_in import StandIn
from lightning_ring.algorithms.server.twin import refuse_optimizers, trained_parameters
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import unrecorded
from lightning_ring.errors import ConfigurationError

Mode = Literal["bulk", "stale", "async"]
_DEFAULT_STALENESS = 2


class ParameterServer(Algorithm):
    """Servers hold the weights w and step them with the gradients that ranks send. At its step each
    rank sends its gradient g to all servers, and goes on from the weights that they send back:

        bulk     w ← the optimizer's step with the mean of all ranks' g, once all have come
        stale    w ← its step with g as it comes; the rank goes on when no other is more than
                 ``staleness`` steps behind
        async    w ← its step with g as it comes

    ``bulk`` trains as ``strategy="ring"``. Otherwise g was computed for weights that others have
    changed since; with ``delay_compensation`` λ the step is taken with

        g + λ · g ⊙ g ⊙ (w - w_r)      where w_r are the weights that the rank had pulled

    A server is a thread of its rank, which also trains, unless it is ``dedicated``. Its optimizer
    is a twin of the user's, of which it holds a part of the state; learning rates are those of the
    rank that pushes. Parameters are cut into equally long parts; under an optimizer that looks at
    whole tensors (LARS, Muon, ...), whole parameters are spread.

    Args:
        servers: How many ranks are servers; `None`: all, which then send and receive as many bytes
            each as in a ring.
        dedicated: The last ``servers`` ranks only serve: they take no batch, and means are over the
            others, the workers. For `distribute` and Fabric. The script runs on all ranks: servers
            have empty loaders, and wait for the workers in the `show_averages` behind the batches.
        mode: As above.
        staleness: Of ``mode="stale"``; 2 if `None`.
        delay_compensation: λ, for ``"async"`` and ``"stale"``; the paper takes 0.04 with learning
            rates from 0.5 down.

    In ``"stale"`` and ``"async"`` ranks may take different numbers of steps in an epoch.
    Evaluations and checkpoints see the servers' weights, from which all ranks go on. Each push is a
    step of the optimizer: N ranks take N times as many steps as with ``"bulk"``, and learning rates
    are not scaled.

    `metrics` has ``delay``: the updates by others between a rank's pull and its push, on average
    since it was read.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    sharded: ClassVar[bool] = True
    steps_alone: ClassVar[bool] = True

    def __init__(
        self,
        servers: int | None = None,
        mode: Mode = "bulk",
        *,
        dedicated: bool = False,
        staleness: int | None = None,
        delay_compensation: float | None = None,
    ) -> None:
        _check_arguments(servers, mode, dedicated, staleness, delay_compensation)
        self.servers = servers
        self.dedicated = dedicated
        self.mode = mode
        self.staleness = _DEFAULT_STALENESS if mode == "stale" and staleness is None else staleness
        self.delay_compensation = delay_compensation
        self.steps_together = mode == "bulk" and not dedicated
        if mode == "bulk":
            self.refuses_clipping = (
                "ParameterServer(mode='bulk') averages gradients at its servers: a rank knows its "
                "own alone. Use mode='async' or 'stale', which clip what each rank sends, or "
                "algorithm='ring'."
            )
        self.num_steps = 0
        self._serving: Serving | None = None
        self._optimizer: StandIn | None = None
        self._asked_to_stop = self._told_to_stop = False
        self._shown_at = 0  # `num_steps` when all ranks last held the servers' weights
        self._delays: list[int] = []
        self._comm: Communicator | None = None

    # -- begin and end

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        warn: Callable[[str], None] = log.warning,
        inform: Callable[[str], None] = log.info,
    ) -> None:
        self.num_workers(comm.world_size)
        if self.servers is not None and self.servers > comm.world_size:
            raise ConfigurationError(
                f"ParameterServer got servers={self.servers}, and the job has {comm.world_size} "
                "rank(s), of which some or all are servers too. Use fewer servers, or None for "
                "all ranks."
            )
        self._module, self._comm = module, comm
        self.set_optimizers(optimizers)

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        refuse_optimizers(optimizers, type(self).__name__)
        chosen = optimizers[0] if optimizers else None
        if self._optimizer is not None and self._optimizer.optimizer is chosen:
            return
        self._end_serving()
        self._optimizer = StandIn(chosen) if chosen is not None else None
        self._serve_at_once()

    def num_workers(self, world_size: int) -> int:
        if not self.dedicated:
            return world_size
        assert self.servers is not None
        if self.servers >= world_size:
            raise ConfigurationError(
                f"ParameterServer got servers={self.servers} with dedicated=True, and the job has "
                f"{world_size} rank(s), of which one at least has to train. Use fewer servers, or "
                "more ranks."
            )
        return world_size - self.servers

    def detach(self, *, wait: bool = True) -> None:
        self._end_serving(wait=wait)
        self._optimizer = None

    def begin_batch(self, active_ranks: int | None = None) -> None:
        if self._optimizer is not None:
            self._serve(self._optimizer)

    def _serve(self, stand_in: StandIn) -> Serving:
        """Collective: as late as the first batch, when the state of a checkpoint is in the
        optimizer.

        Where ranks go at their own pace, before an evaluation or the end on those that have no
        batch by then. With dedicated servers earlier (`_serve_at_once`).
        """
        params = trained_parameters(stand_in.optimizer)
        if self._serving is None or [*map(id, params)] != [*map(id, self._serving.params)]:
            if self.dedicated and self._serving is not None and self.num_steps != self._shown_at:
                raise ConfigurationError(
                    "parameters were frozen or added within an epoch, where dedicated servers do "
                    "not learn of it. Do so on all ranks behind show_averages(), or leave "
                    "dedicated out."
                )
            if self._serving is not None and not self.steps_together and not self.dedicated:
                # the new servers begin with their ranks' parameters
                self._take_weights(self._serving)
            self._end_serving()
            self._serving = self._begin_serving(stand_in, params)
        return self._serving

    def _serve_at_once(self) -> None:
        """Collective. Workers may call any collective between their first batch and an evaluation,
        and so may servers that come to no batch."""
        if self.dedicated and self._optimizer is not None:
            self._serve(self._optimizer)

    def _begin_serving(self, stand_in: StandIn, params: Sequence[Parameter]) -> Serving:
        comm = unrecorded(self._communicator)
        number, num_workers = self.servers or comm.world_size, self.num_workers(comm.world_size)
        spread = [index * comm.world_size // number for index in range(number)]
        serving = Serving(
            stand_in.optimizer,
            params,
            [*range(num_workers, comm.world_size)] if self.dedicated else spread,
            num_workers,
            comm,
            bulk=self.mode == "bulk",
            staleness=self.staleness,
            compensation=self.delay_compensation,
        )
        stand_in.begin(params)
        self._shown_at = self.num_steps
        return serving

    def _end_serving(self, *, wait: bool = True, keep_state: bool = True) -> None:
        """Collective with ``wait``: the optimizer has its state again."""
        serving, self._serving = self._serving, None
        if serving is None or self._optimizer is None:
            return
        try:
            self._optimizer.end(serving.state(keep=True) if wait and keep_state else {})
        finally:
            serving.close(wait=wait)

    # -- a step

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if self._optimizer is not None and optimizer is self._optimizer.optimizer:
            if not self._trains:
                raise ConfigurationError(
                    f"rank {self._communicator.rank} is a server of "
                    "ParameterServer(dedicated=True), which only serves, and was about to take a "
                    "step. Give its script no batches: training.sampler() and "
                    "fabric.setup_dataloaders() do so, and training.num_workers is how many ranks "
                    "train."
                )
            return
        own = {id(param) for param in self._module.parameters()}
        if not optimizer.param_groups or not any(
            id(p) in own for g in optimizer.param_groups for p in g["params"]
        ):
            return
        raise ConfigurationError(
            f"a {type(optimizer).__name__} that ParameterServer does not know is about to step "
            "parameters that its servers hold. Give the one optimizer of all parameters to "
            "distribute() or setup()."
        )

    def after_step(self, optimizer: Optimizer) -> None:
        if (
            self._optimizer is None
            or optimizer is not self._optimizer.optimizer
            or self._serving is None
        ):
            return
        self.num_steps += 1
        told, delay = self._serving.exchange(self._asked_to_stop, self.num_steps)
        self._optimizer.note_parameters()
        self._told_to_stop |= told
        self._delays.append(delay)

    def show_averages(self) -> None:
        if self._optimizer is None:
            return
        serving = self._serving if self.steps_together else self._serve(self._optimizer)
        if serving is not None:
            self._take_weights(serving)

    def _take_weights(self, serving: Serving) -> None:
        """Have all ranks go on from the servers' weights. Collective."""
        assert self._optimizer is not None
        if self._trains:
            serving.rest()
        else:  # not in the meeting, which has a timeout
            serving.wait_for_workers()
        stepped = meet_for_pause(self._communicator, after_steps=self._shown_at != self.num_steps)
        serving.end_rest(with_weights=stepped)
        if stepped:
            self._optimizer.note_parameters()
        self._shown_at = self.num_steps

    def clip_grad_norm_(
        self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        if why := self.refuses_clipping:
            raise ConfigurationError(f"gradients were about to be clipped by their norm, but {why}")
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    @property
    def _trains(self) -> bool:
        return self._communicator.rank < self.num_workers(self._communicator.world_size)

    @property
    def _communicator(self) -> Communicator:
        assert self._comm is not None, "attach() comes first"
        return self._comm

    # -- checkpoints

    def optimizer_state_dict(self, optimizer: Any, *, is_rank_zero: bool) -> dict[str, Any]:
        if (
            self._serving is None
            or self._optimizer is None
            or optimizer is not self._optimizer.optimizer
        ):
            whole: dict[str, Any] = optimizer.state_dict() if is_rank_zero else {}
            return whole
        state = self._serving.state(keep=is_rank_zero)
        return self._optimizer.state_dict(state) if is_rank_zero else {}

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        self._end_serving(keep_state=False)
        if state:
            optimizer.load_state_dict(state)
        self._serve_at_once()

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        self._end_serving()  # parameters were loaded too
        self.num_steps = self._shown_at = state.get("num_steps", 0)
        self._serve_at_once()
        return ""

    # -- requests to stop, progress

    def ask_to_stop(self, asked: bool = True) -> None:
        self._asked_to_stop = asked

    def agreed_to_stop(self) -> bool:
        if not self._told_to_stop or self._serving is None:
            return False
        if not self.steps_together:
            self._serving.rest()
            if not meet_to_stop(self._communicator):
                return False
            self._serving.allow_to_go_on()
        self._told_to_stop = False
        return True

    def progress(self) -> str:
        return f"step {self.num_steps}"

    def metrics(self) -> dict[str, float]:
        delays, self._delays = self._delays, []
        return {"delay": sum(delays) / len(delays)} if delays and self.mode != "bulk" else {}

    def description(self) -> str:
        how = {
            "bulk": f"step once all {'workers' if self.dedicated else 'ranks'} have sent theirs",
            "stale": f"step with each as it comes; no rank is more than {self.staleness} step(s) "
            "ahead",
            "async": "step with each as it comes",
        }[self.mode]
        number = self.servers or self._communicator.world_size
        return (
            f" to {number} {'dedicated ' * self.dedicated}server(s), which {how}. Evaluations, "
            "checkpoints and the end of the training see the servers' weights"
        )


def _check_arguments(
    servers: Any, mode: Any, dedicated: Any, staleness: Any, compensation: Any
) -> None:
    if servers is not None and (type(servers) is not int or servers < 1):
        raise ConfigurationError(
            f"ParameterServer got servers={servers!r}, expected 1 or more, or None for all ranks."
        )
    if not isinstance(dedicated, bool):
        raise ConfigurationError(
            f"ParameterServer got dedicated={dedicated!r}, expected True or False."
        )
    if dedicated and servers is None:
        raise ConfigurationError(
            "ParameterServer got dedicated=True without servers, and not all ranks can be servers "
            "that do not train. Give their number: servers=1."
        )
    if mode not in get_args(Mode):
        expected = ", ".join(map(repr, get_args(Mode)))
        raise ConfigurationError(f"ParameterServer got mode={mode!r}, expected one of {expected}.")
    if staleness is not None and (type(staleness) is not int or staleness < 0):
        raise ConfigurationError(
            f"ParameterServer got staleness={staleness!r}, expected 0 or more steps."
        )
    if staleness is not None and mode != "stale":
        raise ConfigurationError(
            f"ParameterServer got staleness={staleness!r} with mode={mode!r}, which has no such "
            "bound. Use mode='stale', or leave staleness out."
        )
    if compensation is None:
        return
    if (
        isinstance(compensation, bool)
        or not isinstance(compensation, (int, float))
        or not 0 < compensation < float("inf")
    ):
        raise ConfigurationError(
            f"ParameterServer got delay_compensation={compensation!r}, expected a number above 0, "
            "such as 0.04, or None."
        )
    if mode == "bulk":
        raise ConfigurationError(
            f"ParameterServer got delay_compensation={compensation!r} with mode='bulk', where no "
            "gradient is late. Use mode='async' or 'stale', or leave delay_compensation out."
        )
