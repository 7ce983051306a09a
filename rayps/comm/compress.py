"""Gradient compression: a vector as a uint8 tensor and back, with error feedback. Pure.

| name   | bytes for n elements    | what is lost                                                     |
|--------|-------------------------|------------------------------------------------------------------|
| fp16   | 2 n                     | digits after the third, and magnitudes beyond 65504              |
| bf16   | 2 n                     | digits after the second                                          |
| int8   | n + 4 ceil(n / 1024)    | at most 1/254 of the largest magnitude in a block of 1024        |
| top_k  | 8 fraction x n          | all but the largest magnitudes                                   |

No part of a gradient is lost for good: `ErrorFeedback` adds the error of one encoding to the next vector.

Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
DNNs", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML
2019; Lin et al., "Deep gradient compression", ICLR 2018 (top_k; without its momentum correction and warm-up).

NaN and infinity decode to NaN or infinity (under int8, to NaN in the whole block). Finite values beyond an encoding's
range are clipped to it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rayps.core.compression import compression_of
from rayps.core.errors import ConfigError
from rayps.core.values import JsonObject

BLOCK = 1024  # elements that share one scale under int8
CANDIDATES = ("fp16", "int8")  # candidates of `auto`: without top_k, which changes convergence and must be asked for
MARGIN = 0.9  # under `auto`, an encoded mean must take less than this share of the plain time


class Codec(Protocol):
    """An encoding of a vector in fewer bytes."""

    code: int  # the codec's number in a message; above 0

    def size(self, n: int) -> int:
        """Return the bytes of n encoded elements."""

    def encode(self, x: Tensor) -> Tensor:
        """Encode a floating vector as uint8 [size(n)]; `x` does not change."""

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return the n elements of `data` as a new vector. Raises ConfigError: `data` has another length."""


class HalfPrecision:
    """16 bits an element."""

    def __init__(self, code: int, dtype: torch.dtype) -> None:
        self.code, self._dtype = code, dtype

    def size(self, n: int) -> int:
        """See Codec."""
        return 2 * n

    def encode(self, x: Tensor) -> Tensor:
        """See Codec."""
        return _within(x, self._dtype).view(torch.uint8)

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """See Codec."""
        _must_be(data, self.size(n), n)
        return data.view(self._dtype).to(dtype, copy=True)


class BlockQuantized:
    """8 bits an element, and a scale (float32) for each block of 1024."""

    code = 3

    def size(self, n: int) -> int:
        """See Codec."""
        return n + 4 * _blocks(n)

    def encode(self, x: Tensor) -> Tensor:
        """See Codec."""
        n = x.numel()
        rows = torch.zeros(_blocks(n), BLOCK, dtype=torch.float32, device=x.device)
        rows.view(-1)[:n] = _within(x, torch.float32)
        if n == 0:
            return rows.view(torch.uint8).view(-1)
        scales = torch.maximum(rows.amax(1), rows.amin(1).neg_()).div_(127)
        steps = torch.where(scales == 0, 1.0, scales)  # a scale of 0: the block has only zeros
        rows.div_(steps[:, None]).round_().clamp_(-127, 127).nan_to_num_(
            0.0
        )  # a scale that is not finite marks the block
        return torch.cat([scales.view(torch.uint8), rows.view(-1)[:n].to(torch.int8).view(torch.uint8)])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """See Codec."""
        _must_be(data, self.size(n), n)
        head = 4 * _blocks(n)
        wide, whole = torch.promote_types(dtype, torch.float32), n // BLOCK * BLOCK
        scales, x = data[:head].view(torch.float32).to(wide), data[head:].view(torch.int8).to(wide)
        x[:whole].view(-1, BLOCK).mul_(scales[: n // BLOCK, None])
        if whole < n:
            x[whole:].mul_(scales[-1])
        return x.to(dtype)


class TopK:
    """Only the largest magnitudes, each with its index: int32 [k], then float32 [k], in the order of indices."""

    code = 4

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def size(self, n: int) -> int:
        """See Codec."""
        return 8 * min(n, max(1, int(self._fraction * n)))

    def encode(self, x: Tensor) -> Tensor:
        """See Codec."""
        k = self.size(x.numel()) // 8
        if x.numel() > torch.iinfo(torch.int32).max:
            raise ConfigError(
                f"top_k encodes at most 2^31 elements, the vector has {x.numel()}: use more shards, or int8"
            )
        places = _largest(x.abs(), k).sort().values
        values = _within(x[places], torch.float32)
        return torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """See Codec; k follows from the length of `data`."""
        k = data.numel() // 8
        _must_be(data, 8 * min(k, n), n)
        x = torch.zeros(n, dtype=dtype, device=data.device)
        places = data[: 4 * k].view(torch.int32).long()
        if k and not 0 <= int(places.min()) <= int(places.max()) < n:
            raise ConfigError(f"an encoded vector has indices outside its {n} elements")
        x[places] = data[4 * k :].view(torch.float32).to(dtype)
        return x


_PLAIN: dict[str, Codec] = {
    "fp16": HalfPrecision(1, torch.float16),
    "bf16": HalfPrecision(2, torch.bfloat16),
    "int8": BlockQuantized(),
}
_BY_CODE: dict[int, Codec] = {codec.code: codec for codec in (*_PLAIN.values(), TopK(1.0))}


def codec(text: str) -> Codec:
    """Return the codec that `compression` names: fp16, bf16, int8, top_k or top_k:FRACTION. Raises ConfigError."""
    name, fraction = compression_of(text)
    return TopK(fraction) if name == "top_k" else _PLAIN[name]


def decoded(code: int, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Decode `data` by the codec with the number `code`, as n elements of `dtype`. Raises ConfigError."""
    if code not in _BY_CODE:
        raise ConfigError(f"an encoded vector has the unknown code {code}: is the peer of another version?")
    return _BY_CODE[code].decode(data, n, dtype)


def choice(where: str, picked: str, what: str, seconds: dict[str, float] | None = None) -> JsonObject:
    """Return the event that says how gradients to a ring or to servers (`where`) are sent.

    `picked` is the chosen codec, "off" for none. `seconds`: the measured time of `what` with each codec; None = not
    measured.
    """
    why = what
    if seconds is not None:
        best = min(CANDIDATES, key=lambda name: seconds[name])
        why = f"{what} took {1e3 * seconds['off']:.2f} ms uncompressed and {1e3 * seconds[best]:.2f} ms as {best}"
    message = f"gradients to the {where} are sent {'uncompressed' if picked == 'off' else 'as ' + picked}: {why}"
    found: JsonObject = {"kind": "choice", "message": message, "compression": picked}
    if seconds:
        found["seconds"] = seconds
    return found


class ErrorFeedback:
    """The sum of the errors of a codec on one sender's vectors, which is added to its next vector."""

    def __init__(self, codec: Codec, n: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.codec = codec
        self.residual = torch.zeros(n, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def encode(self, x: Tensor, lo: int = 0) -> Tensor:
        """Encode the sender's next vector from element `lo` on, plus the earlier errors of these elements, as uint8."""
        rest = self.residual[lo : lo + x.numel()]
        rest += x
        data = self.codec.encode(rest)
        rest -= self.codec.decode(data, rest.numel(), rest.dtype)
        rest.nan_to_num_(0.0, 0.0, 0.0)
        return data


def _within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`, whose range may be smaller; finite values are clipped to the range."""
    limit = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= limit or x.numel() == 0:
        return x.to(dtype)
    least, most = torch.aminmax(x)
    if -limit <= least and most <= limit:  # nearly always true; false if `x` has a NaN
        return x.to(dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # bfloat16 cannot represent the limit
    return torch.where(wide.isinf(), wide, wide.clamp(-limit, limit)).to(dtype)


def _largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest, in any order; NaN counts as large."""
    if x.device.type != "cpu" or k == 0:
        return x.topk(k, sorted=False).indices
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).numpy()
    return torch.from_numpy(np.argpartition(wide, len(wide) - k)[len(wide) - k :])  # ten times as fast as topk


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _must_be(data: Tensor, size: int, n: int) -> None:
    if data.numel() != size:
        raise ConfigError(f"{data.numel()} bytes do not hold {n} encoded elements; {size} would")
