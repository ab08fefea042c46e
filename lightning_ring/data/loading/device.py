"""What is done to a whole batch on the device: normalisation and colours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_GRAY = (0.2989, 0.587, 0.114)


class DeviceTransform(nn.Module):
    """uint8 images to normalised floats, with random brightness, contrast and saturation of each image.

    As torchvision's `ColorJitter` (each factor uniform in [1 - x, 1 + x], at least 0; applied in this order), then
    `Normalize`.

    Args:
        mean, std: Of the three channels, for pixels in [0, 1].
        brightness, contrast, saturation: How far the factors reach; 0 leaves the images as they are.
        dtype: Of the result.
    """

    num_uniforms = 3

    def __init__(
        self,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        *,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.reach = brightness, contrast, saturation
        self.dtype = dtype
        scale = 1 / (255 * torch.tensor(std, dtype=torch.float64))
        self.register_buffer("scale", scale.to(dtype))
        self.register_buffer("shift", (-255 * torch.tensor(mean, dtype=torch.float64) * scale).to(dtype))
        self.scale: Tensor
        self.shift: Tensor

    @property
    def is_random(self) -> bool:
        return any(self.reach)

    def forward(self, images: Tensor, uniforms: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """``images``: batch x 3 x height x width, uint8; ``uniforms``: batch x 3. The result is channels last.

        With ``out`` (the shape of ``images``, channels last, of this `dtype`) it is written there.
        """
        rows = images.permute(0, 2, 3, 1)
        if self.is_random:
            assert uniforms is not None
        if out is None:
            out = torch.empty(rows.shape, dtype=self.dtype, device=rows.device).permute(0, 3, 1, 2)
        done = out.permute(0, 2, 3, 1)
        # A CPU takes one image at a time, which then stays in its cache.
        num = 1 if rows.device.type == "cpu" else max(1, len(rows))
        for start in range(0, len(rows), num):
            part = slice(start, start + num)
            self._transform(rows[part], None if uniforms is None else uniforms[part], done[part])
        return out

    def _transform(self, rows: Tensor, uniforms: Tensor | None, done: Tensor) -> None:
        rows = rows.to(self.dtype)
        if self.is_random and uniforms is not None:
            rows = self._jitter(rows, uniforms.to(self.dtype))
        # Whole rows at a time: along three channels a CPU would not use its vector units.
        width = rows.shape[2]
        scale, shift = self.scale.repeat(width), self.shift.repeat(width)
        torch.addcmul(shift, rows.reshape(-1, 3 * width), scale, out=done.view(-1, 3 * width))

    def _jitter(self, rows: Tensor, uniforms: Tensor) -> Tensor:
        """``rows``: batch x height x width x 3, 0 to 255."""
        for column, (name, reach) in enumerate(zip(("brightness", "contrast", "saturation"), self.reach, strict=True)):
            if reach == 0:
                continue
            low = max(0.0, 1 - reach)
            factor = (low + (1 + reach - low) * uniforms[:, column]).view(-1, 1, 1, 1)
            if name == "brightness":
                rows = (rows * factor).clamp_(0, 255)
                continue
            gray = (rows * rows.new_tensor(_GRAY)).sum(-1, keepdim=True)
            other = gray.mean((1, 2, 3), keepdim=True) if name == "contrast" else gray
            rows = torch.lerp(other.expand_as(rows), rows, factor).clamp_(0, 255)
        return rows
