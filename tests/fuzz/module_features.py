"""What the LightningModule of a random program may do. The first option of an axis is the plain
one.
"""

from tests.fuzz.option import option

# a loop by hand has to wait before it reads sharded parameters between two steps; a Trainer does
WAIT = "getattr(self.trainer, 'wait', int)()\n"

BLOCKS = {
    "Linear()": option(4),
    "Large()": option(),
    "Norm()": option(),
    "Conv()": option(),
    "Conv(norm=True)": option(),
    "Twice()": option(),
    "Shapes()": option(),
    "Parametrized()": option(),
    "Tied()": option(),
    "Embedded()": option(),
    "Embedded(sparse=True)": option(0.3),
    "Method()": option(),
    "Recurrent()": option(),
    "Complex()": option(0.5),
    "EveryOtherStep()": option(unused=True),
    "OnOneRank()": option(unused=True),
    "Unused()": option(unused=True),
    "Frozen()": option(),
    "Raises()": option(0),  # `rules.settle` puts it in
    "Dropped()": option(0.5, without="one"),
    "Checkpointed(Linear(), reentrant=False)": option(),
    "Checkpointed(Linear(), reentrant=False, calls=2)": option(0.5),
    "Checkpointed(Twice(), reentrant=True)": option(0.7),
    "Checkpointed(Linear(), reentrant=True, calls=2)": option(0.5),
}

_STEP = "loss = self.share(batch, self.step_of(batch_idx))"
# parameters of each optimizer
TWO, EACH = "[of(layers[:half]), of(layers[half:])]", "[[p] for p in of(layers)]"
_MANUAL = "self.automatic_optimization = False"


def _each(condition="", toggle=False):
    """Two optimizers, one after the other."""
    lines = [
        _STEP,
        "optimizer.zero_grad()",
        "self.manual_backward(loss)",
        "$clip",
        "optimizer.step()",
    ]
    if toggle:
        lines = ["self.toggle_optimizer(optimizer)", *lines, "self.untoggle_optimizer(optimizer)"]
    if condition:
        lines = [f"if not ({condition}):", "    continue", *lines]
    return (
        "for number, optimizer in enumerate(self.optimizers()):\n    "
        + "\n    ".join(lines)
        + "\n$log\n$steps"
    )


TRAINING = {
    "automatic": option(8, step=f"{_STEP}\nif loss is not None:\n    $log\nreturn loss"),
    "manual": option(
        2,
        init=_MANUAL,
        step="optimizer = "
        f"self.optimizers()\n{_STEP}\noptimizer.zero_grad()\nself.manual_backward(loss)\n$clip\n"
        "optimizer.step()\n$log\n$steps",
    ),
    "manual, backward twice before a step": option(
        rounding=True,
        init=_MANUAL,
        step=f"optimizer = self.optimizers()\n{_STEP}\nself.manual_backward(loss / 2)\nif "
        "batch_idx % 2:\n    $clip\n    optimizer.step()\n    optimizer.zero_grad()\n$log\n$steps",
    ),
    "manual, first backward local": option(
        init=_MANUAL,
        step=f"optimizer = self.optimizers()\n{_STEP}\nlocal = getattr(self.trainer.strategy, "
        "'block_backward_sync', nullcontext)\nwith nullcontext() if batch_idx % 2 else "
        "local():\n    self.manual_backward(loss / 2)\nif batch_idx % 2:\n    $clip\n    "
        "optimizer.step()\n    optimizer.zero_grad()\n$log\n$steps",
    ),
    "manual, model.no_sync": option(
        0.5,
        init=_MANUAL,
        step=f"optimizer = self.optimizers()\n{_STEP}\n"
        "local = nullcontext if self.trainer.world_size == 1 else self.trainer.model.no_sync\n"
        "with nullcontext() if batch_idx % 2 else local():\n    self.manual_backward(loss / 2)\n"
        "if batch_idx % 2:\n    optimizer.step()\n    optimizer.zero_grad()\n$log\n$steps",
    ),
    "manual, loss.backward": option(
        without="ddp",
        init=_MANUAL,
        step="optimizer = "
        f"self.optimizers()\n{_STEP}\noptimizer.zero_grad()\nloss.backward()\noptimizer.step()\n"
        "$log\n$steps",
    ),
    "manual, clipped after each of two backwards": option(
        rounding=True,
        init=_MANUAL,
        step=f"optimizer = self.optimizers()\n{_STEP}\nself.manual_backward(loss / 2)\n"
        "self.clip_gradients(optimizer, gradient_clip_val=0.05)\n"
        "if batch_idx % 2:\n    optimizer.step()\n    optimizer.zero_grad()\n$log\n$steps",
    ),
    "manual, a backward raises on all ranks": option(  # at the block `Raises`
        without="ddp",
        init=_MANUAL,
        step=f"optimizer = self.optimizers()\n{_STEP}\ntry:\n    self.manual_backward(loss)\n"
        "except ArithmeticError:\n    optimizer.zero_grad()\n    return\n"
        "$clip\noptimizer.step()\noptimizer.zero_grad()\n$log\n$steps",
    ),
    "manual, optimizers step in backward": option(
        without="ddp",
        init=_MANUAL,
        parts=EACH,
        train_start="step_in_backward(self.trainer.optimizers)",
        step=f"{_STEP}\nself.manual_backward(loss)\n$log",
    ),
    "manual, two optimizers": option(init=_MANUAL, step=_each(), parts=TWO),
    "manual, two optimizers, toggled": option(
        unused=True, init=_MANUAL, step=_each(toggle=True), parts=TWO
    ),
    "manual, two optimizers, one every second step": option(
        init=_MANUAL, step=_each("batch_idx % (number + 1) == 0"), parts=TWO
    ),
    "manual, gradients of two tasks by reference": option(
        init=_MANUAL,
        step=f"optimizer, tasks = self.optimizers(), []\nfor task in (1.0, 2.0):\n    {_STEP}\n   "
        " optimizer.zero_grad()\n    self.manual_backward(loss + task * "
        "self.weight().abs().square().mean())\n    tasks.append([p.grad for p in "
        "self.parameters()])\nfor p, a, b in zip(self.parameters(), *tasks):\n    if p.grad is "
        "not None:\n        p.grad.copy_(a - 0.5 * b)\noptimizer.step()\n$log\n$steps",
    ),
}

EXTRA = {  # other backwards than the training's
    "none": option(12),
    "saliency on rank 0 in validation": option(
        validation="if self.trainer.is_global_zero:\n    with torch.enable_grad():\n"
        "        self.evaluate([t.clone() for t in batch]).backward()\n    self.zero_grad()"
    ),
    "adversarial example on some ranks": option(
        input="if (step + rank) % 2:\n    x = x.clone().requires_grad_()\n"
        "    F.mse_loss(self(x, rank, step), y).backward()\n    x = (x + 0.1 * x.grad).detach()"
    ),
    "adversarial example by autograd.grad": option(
        input="x = x.clone().requires_grad_()\n"
        "x = (x + 0.1 * torch.autograd.grad(F.mse_loss(self(x, rank, step), y), x)[0]).detach()"
    ),
    "gradient penalty": option(
        input="x = x.clone().requires_grad_()",
        loss="loss = loss + 0.1 * torch.autograd.grad(h.sum(), x, "
        "create_graph=True)[0].pow(2).mean()",
    ),
    "torch.func.grad": option(
        loss="weights = dict(self.layers[0].named_parameters())\ndef squares(w):\n    return "
        "torch.func.functional_call(self.layers[0], w, (x, x, rank, step)).pow(2).mean()\ninner = "
        "torch.func.grad(squares)(weights)\nmoved = {name: p - 0.1 * inner[name] for name, p in "
        "weights.items()}\nloss = loss + squares(moved)"
    ),
    "backward between two steps on rank 0": option(
        batch_end="if self.trainer.is_global_zero:\n    self.evaluate(batch).backward()\n    "
        "self.zero_grad()"
    ),
    "a copy of the model learns by itself": option(
        batch_end=WAIT
        + "twin = copy.deepcopy(self.layers)\nh = x = batch[0].to(DTYPE)\nfor layer in "
        "twin:\n    h = layer(h, x, 0, 0)\n(h.pow(2).mean() * (1 + self.global_rank)).backward()"
    ),
    "regulariser over all parameters": option(
        2,
        loss="loss = loss + 0.01 * sum(p.abs().pow(2).sum() for p in self.parameters() if "
        "p.requires_grad)",
    ),
}

HOOKS = {  # what the user's hooks do with gradients and weights; any number of them
    "reads gradients after backward": option(
        after_backward="self.gradients += [0.0 if p.grad is None else "
        "p.grad.to_dense().abs().sum().item() for p in self.parameters()]"
    ),
    "scales gradients after backward": option(
        after_backward="for p in self.parameters():\n    if p.grad is not None:\n        "
        "p.grad.mul_(0.5)"
    ),
    "assigns gradients after backward": option(
        after_backward="for p in self.parameters():\n    if p.grad is not None:\n        p.grad = "
        "p.grad * 0.5"
    ),
    "keeps gradients by reference": option(
        after_backward="self.gradients += [g.to_dense().abs().sum().item() for g in self.kept]\n"
        "self.kept = [p.grad for p in self.parameters() if p.grad is not None]",
        init="self.kept = []",
    ),
    "tensor hook": option(init="self.weight().register_hook(lambda grad: grad * 0.5)"),
    "post-accumulate hook": option(init="self.weight().register_post_accumulate_grad_hook(halve)"),
    "post-accumulate hook at train start": option(
        train_start="def note(p):\n    self.seen.append(len(p.grad))\n"
        "self.weight().register_post_accumulate_grad_hook(note)"
    ),
    "clamps weights after a step": option(
        batch_end=WAIT + "with torch.no_grad():\n    for p in self.parameters():\n"
        "        p.clamp_(-0.5, 0.5) if not p.is_complex() else p.mul_(0.99)"
    ),
    "reads weights after a step": option(
        batch_end=WAIT + "self.seen += [p.detach().abs().sum().item() for p in self.parameters()]"
    ),
    "best weights by state_dict": option(
        batch_end="if batch_idx == 0:\n    self.best = copy.deepcopy(self.state_dict())\n"
        "elif batch_idx == 2:\n    self.load_state_dict(self.best)"
    ),
    "reads optimizer state": option(
        0.5, batch_end="self.seen += [len(o.state) for o in self.trainer.optimizers]"
    ),
    "changes the learning rate": option(
        batch_end="for o in self.trainer.optimizers:\n    for group in o.param_groups:\n        "
        "group['lr'] *= 0.9"
    ),
    "average of weights before a step": option(
        init="self.average = None",
        before_step="now = torch.cat([torch.view_as_real(p.detach()).flatten() if p.is_complex() "
        "else p.detach().flatten() for p in self.parameters()])\nself.average = now if "
        "self.average is None else 0.9 * self.average + 0.1 * now\n"
        "self.seen.append(self.average.abs().sum().item())",
    ),
    "evaluates a copy of itself": option(
        batch_end=WAIT
        + "self.seen.append(copy.deepcopy(self).evaluate(torch.ones(2, 2, 6)).item())"
    ),
    "evaluates an AveragedModel": option(
        init="self.ema = []",
        batch_end=WAIT + "self.ema = self.ema or [AveragedModel(self, "
        "multi_avg_fn=get_ema_multi_avg_fn(0.9))]\nself.ema[0].update_parameters(self)\n"
        "self.seen.append(self.ema[0].module.evaluate(torch.ones(2, 2, 6)).item())",
    ),
    "gradients are zeros, not None": option(
        methods="def optimizer_zero_grad(self, epoch, batch_idx, optimizer):\n"
        "    optimizer.zero_grad(set_to_none=False)"
    ),
    "every third step is skipped": option(
        methods="def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):\n"
        "    if batch_idx % 3 == 1:\n        optimizer_closure()\n    else:\n"
        "        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)"
    ),
}

SKIP = {  # training_step returns None; Lightning's DDP refuses it
    "none": option(15),
    "None on all ranks": option(skip="if step % 3 == 1:\n    return None", without="ddp"),
    "None on one rank": option(
        skip="if step % 3 == 1 and rank == 1:\n    return None", without="ddp"
    ),
}

FREEZE = {
    "none": option(10),
    "first layer frozen later": option(
        unused=True,
        epoch_start="if self.current_epoch == 1:\n    self.layers[0].requires_grad_(False)",
    ),
    "first layer thawed later": option(
        unused=True,
        init="self.layers[0].requires_grad_(False)",
        epoch_start="if self.current_epoch == 1:\n    self.layers[0].requires_grad_(True)",
    ),
    "first layer every other batch": option(
        unused=True, batch_start="self.layers[0].requires_grad_(batch_idx % 2 == 1)"
    ),
    "finetuning callback": option(
        unused=True,
        init="self.backbone = self.layers[0].requires_grad_(False)",
        callbacks="BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01, "
        "verbose=False)",
        trained="parts = [[p for p in part if p.requires_grad] for part in parts]",
    ),
    "new layer in the second epoch": option(
        epoch_start="if self.current_epoch == 1:\n    torch.manual_seed(SEED + 1)\n    new = "
        "Linear().to(DTYPE)\n    self.layers.append(new)\n    "
        "self.trainer.optimizers[0].add_param_group({'params': list(new.parameters())})"
    ),
    "new optimizer in the second epoch": option(
        epoch_start="if self.current_epoch == 1:\n    "
        "self.trainer.strategy.setup_optimizers(self.trainer)"
    ),
    "own optimizers in the second epoch": option(
        epoch_start="if self.current_epoch == 1:\n    self.trainer.optimizers = "
        "self.configure_optimizers()[0]"
    ),
}

MODULE = {
    "training": TRAINING,
    "extra": EXTRA,
    "skip": SKIP,
    "freeze": FREEZE,
}
