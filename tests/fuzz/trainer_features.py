"""How a random program trains: precision, optimizer, schedule, Trainer, strategy. The first
option is the plain one.
"""

from tests.fuzz.option import option

PRECISION = {
    "64-true": option(8, trainer="precision='64-true'"),
    "double module": option(3, init_end="self.double()", trainer="precision='32-true'"),
    "32-true": option(0.7, without="one", dtype="torch.float32"),
    "bf16-mixed": option(
        0.5, without="one", dtype="torch.float32", trainer="precision='bf16-mixed'"
    ),
}

OPTIMIZER = {
    "SGD": option(3, optimizer="torch.optim.SGD({}, lr=0.05, momentum=0.9)"),
    "SGD without momentum": option(optimizer="torch.optim.SGD({}, lr=0.05)"),
    "Adam": option(2, optimizer="torch.optim.Adam({}, lr=0.01)"),
    "Adam amsgrad": option(optimizer="torch.optim.Adam({}, lr=0.01, amsgrad=True)"),
    "AdamW foreach": option(optimizer="torch.optim.AdamW({}, lr=0.01, foreach=True)"),
    "AdamW fused": option(optimizer="torch.optim.AdamW({}, lr=0.01, fused=True)", rounding=True),
    "NAdam": option(optimizer="torch.optim.NAdam({}, lr=0.01)"),
    "RMSprop": option(
        optimizer="torch.optim.RMSprop({}, lr=0.005, momentum=0.5, centered=True, eps=1e-3)"
    ),
    "Adagrad": option(optimizer="torch.optim.Adagrad({}, lr=0.05)"),
    "ASGD": option(0.5, optimizer="torch.optim.ASGD({}, lr=0.05)"),
    "LARS": option(optimizer="LARS({}, lr=0.5, momentum=0.9)"),
    "LAMB": option(optimizer="LAMB({}, lr=0.01)"),
    "LBFGS": option(
        0.4, optimizer="torch.optim.LBFGS({}, lr=0.1, max_iter=2)", without="ring_sharded"
    ),
    # needs a model of sparse tables alone
    "SparseAdam": option(0, optimizer="torch.optim.SparseAdam({}, lr=0.01)"),
}

GROUPS = {
    "one": option(3, groups="{0}"),
    "two": option(
        groups="[{{'params': {0}[::2], 'weight_decay': 0.01}}, {{'params': {0}[1::2], 'lr': 0.02}}]"
    ),
}

SCHEDULE = {
    "none": option(3),
    "per step": option(
        scheduler="{{'scheduler': torch.optim.lr_scheduler.StepLR({0}, 2, 0.5), "
        "'interval': 'step'}}"
    ),
    "per epoch": option(scheduler="torch.optim.lr_scheduler.CosineAnnealingLR({0}, 4)"),
    "one cycle": option(
        scheduler="{{'scheduler': torch.optim.lr_scheduler.OneCycleLR({0}, 0.1, total_steps=40), "
        "'interval': 'step'}}"
    ),
    "on a plateau": option(
        scheduler="{{'scheduler': torch.optim.lr_scheduler.ReduceLROnPlateau({0}, patience=0), "
        "'monitor': 'val'}}"
    ),
    "warm-up": option(
        scheduler="{{'scheduler': WarmupLR({0}, gradual_warmup(4, start_factor=0.25)), "
        "'interval': 'step'}}"
    ),
}

ACCUMULATE = {
    "1": option(6),
    "2": option(2, trainer="accumulate_grad_batches=2"),
    "3": option(trainer="accumulate_grad_batches=3"),
    "1, then 2": option(callbacks="GradientAccumulationScheduler({0: 1, 1: 2})"),
}

CLIP = {
    "none": option(5),
    "norm": option(
        2,
        trainer="gradient_clip_val=0.05",
        clip="self.clip_gradients(optimizer, gradient_clip_val=0.05)",
        clip_by_hand="self.clip(self.clip_norm_, 0.05)",
    ),
    "value": option(
        trainer="gradient_clip_val=0.01, gradient_clip_algorithm='value'",
        clip="self.clip_gradients(optimizer, gradient_clip_val=0.01, "
        "gradient_clip_algorithm='value')",
        clip_by_hand="self.clip(nn.utils.clip_grad_value_, 0.01)",
    ),
    "overridden": option(
        methods="def configure_gradient_clipping(self, optimizer, *_, **__):\n"
        "    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm='norm')"
    ),
}

LOG = {
    "none": option(2),
    "synchronised": option(2, log="self.log('loss', loss.detach(), sync_dist=True)"),
    "per epoch": option(
        log="self.log('loss', loss.detach(), sync_dist=True, on_step=True, on_epoch=True)"
    ),
    "of each rank": option(log="self.log('loss', loss.detach())", without_one_metrics="yes"),
}

VALIDATION = {
    "none": option(2, trainer="limit_val_batches=0"),
    "synchronised loss": option(
        2, validation="self.log('val', self.evaluate(batch), sync_dist=True)"
    ),
    "sum and maximum": option(
        validation="loss = self.evaluate(batch)\nself.log('val', loss, sync_dist=True)\n"
        "self.log('top', loss, sync_dist=True, reduce_fx='max')"
    ),
    "metric object": option(
        init="self.metric = torchmetrics.MeanMetric().set_dtype(DTYPE)",
        validation="self.metric.update(self.evaluate(batch))\nself.log('val', self.metric)",
    ),
    "twice an epoch": option(
        validation="self.log('val', self.evaluate(batch), sync_dist=True)",
        trainer="val_check_interval=2",
    ),
}

AGAIN = {
    "once": option(7),
    "fit twice": option(0.5),
    "resumed on another strategy": option(1.5),
    "resumed on another number of ranks": option(1),
    "resumed, and straight": option(1),  # under each strategy the same bits
}

BUCKETS = {
    "default": option(2),
    "one parameter": option(2, ring="bucket_cap_mb=1e-6"),
    "tiny": option(2, ring="bucket_cap_mb=0.0005"),
}

COMPRESSION = {
    "none": option(25),
    "bf16": option(ring="compression='bf16'"),
    "fp16": option(ring="compression='fp16'"),
} | {  # these have no reference: a run that is resumed must equal a straight one
    name: option(0.5, without="one ddp", ring=f"compression={name}")
    for name in (
        "Int8(min_numel=0)",
        "OneBit(min_numel=0)",
        "TernGrad(min_numel=0)",
        "TopK(0.05, min_numel=0)",
        "DGC(0.05, warmup_steps=5, min_numel=0)",
        "PowerSGD(rank=1, start_iter=2, min_compression=1)",
        "ErrorFeedback(Int8(min_numel=0))",
    )
}

TRAINER = {
    "precision": PRECISION,
    "optimizer": OPTIMIZER,
    "groups": GROUPS,
    "schedule": SCHEDULE,
    "accumulate": ACCUMULATE,
    "clip": CLIP,
    "log": LOG,
    "validation": VALIDATION,
    "again": AGAIN,
    "buckets": BUCKETS,
    "compression": COMPRESSION,
}
