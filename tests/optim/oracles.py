"""The papers' algorithms in NumPy float64, written from the formulas and sharing nothing with
the package.
"""

import numpy as np


class NumpyLARS:
    def __init__(self, lr, momentum=0.9, nesterov=False, weight_decay=0.0, trust_coefficient=0.001,
                 eps=0.0, momentum_form="paper", maximize=False, adapt=True):  # fmt: skip
        self.lr, self.mu, self.nesterov, self.wd = lr, momentum, nesterov, weight_decay
        self.eta, self.eps, self.form, self.maximize, self.adapt = (
            trust_coefficient, eps, momentum_form, maximize, adapt)  # fmt: skip
        self.v = {}

    def step(self, weights, grads):
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            if g is None:
                continue
            g = -g if self.maximize else g
            w_norm, g_norm = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
            ratio = 1.0
            if self.adapt and w_norm > 0 and g_norm > 0:
                ratio = self.eta * w_norm / (g_norm + self.wd * w_norm + self.eps)
            d = ratio * (g + self.wd * w)
            if self.form == "paper":
                d = self.lr * d
            v = self.v[i] = self.mu * self.v.get(i, np.zeros_like(w)) + d
            change = self.mu * v + d if self.nesterov else v
            weights[i] = w - (change if self.form == "paper" else self.lr * change)


class NumpyLAMB:
    def __init__(self, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bias_correction=True,
                 trust_clip=None, maximize=False, adapt=True, max_grad_norm=None):  # fmt: skip
        self.lr, (self.b1, self.b2), self.eps, self.wd = lr, betas, eps, weight_decay
        self.correct, self.clip, self.maximize, self.adapt, self.max_norm = (
            bias_correction, trust_clip, maximize, adapt, max_grad_norm)  # fmt: skip
        self.m, self.v, self.t = {}, {}, {}

    def step(self, weights, grads):
        total = np.sqrt(sum((g * g).sum() for g in grads if g is not None))
        divisor = 1.0 if self.max_norm is None else max(total / self.max_norm, 1.0)
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            if g is None:
                continue
            g = (-g if self.maximize else g) / divisor
            t = self.t[i] = self.t.get(i, 0) + 1
            m = self.m[i] = self.b1 * self.m.get(i, 0.0) + (1 - self.b1) * g
            v = self.v[i] = self.b2 * self.v.get(i, 0.0) + (1 - self.b2) * g**2
            if self.correct:
                m, v = m / (1 - self.b1**t), v / (1 - self.b2**t)
            u = m / (np.sqrt(v) + self.eps) + self.wd * w
            w_norm, u_norm = np.sqrt((w * w).sum()), np.sqrt((u * u).sum())
            ratio = w_norm / u_norm if self.adapt and w_norm > 0 and u_norm > 0 else 1.0
            if self.clip is not None and self.adapt and w_norm > 0 and u_norm > 0:
                ratio = min(ratio, self.clip)
            weights[i] = w - self.lr * ratio * u


ORACLES = {"LARS": NumpyLARS, "LAMB": NumpyLAMB}
