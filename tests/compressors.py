"""Compressors that also compress the few gradients of a small network."""

from lightning_ring.gradients.compression import DGC, Int8, OneBit, PowerSGD, TernGrad, TopK

COMPRESSORS = {
    "none": lambda: None,
    "fp16": lambda: "fp16",
    "bf16": lambda: "bf16",
    "int8": lambda: Int8(0),
    "onebit": lambda: OneBit(0),
    "terngrad": lambda: TernGrad(min_numel=0),
    "topk": lambda: TopK(0.1, 0),
    "dgc": lambda: DGC(0.1, warmup_steps=0, min_numel=0),
    "powersgd": lambda: PowerSGD(rank=1, start_iter=0),
}
MESSAGES = ("int8", "onebit", "terngrad", "topk", "dgc", "powersgd")  # of a form of their own
