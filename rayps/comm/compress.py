"""Gradient compression: encode a vector as a uint8 tensor and decode it, with error feedback. No I/O.

| name   | bytes for n elements    | what is lost                                                     |
|--------|-------------------------|------------------------------------------------------------------|
| fp16   | 2 n                     | digits after the third, and magnitudes beyond 65504              |
| bf16   | 2 n                     | digits after the second                                          |
| int8   | n + 4 ceil(n / 1024)    | per element at most 1/254 of its block's largest magnitude       |
| top_k  | 8 fraction x n          | all but the largest magnitudes                                   |

A block is 1024 elements. `ErrorFeedback` adds what one encoding loses to the next vector.

Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
DNNs", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML
2019; Lin et al., "Deep gradient compression", ICLR 2018 (top_k; without its momentum correction and warm-up).

NaN and infinity are decoded as NaN or infinity. Under int8 the whole block is decoded as NaN. Finite values beyond an
encoding's range are clipped to the range.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from rayps_client.errors import ConfigError
from rayps_client.values import JsonObject
from torch import Tensor

from rayps.core.strategy.compression import compression_of

BLOCK = 1024  # elements that share one scale under int8
CANDIDATES = ("fp16", "int8")  # candidates of `auto`; top_k is not one, because it changes convergence
MARGIN = 0.9  # `auto` selects a codec only if a mean with the codec takes less than this share of the time without


class Codec(Protocol):
    """Encodes a vector in fewer bytes, and decodes it."""

    code: int  # the number above 0 that identifies the codec in a message

    def size(self, n: int) -> int:
        """Return the number of bytes that n elements take when they are encoded."""

    def encode(self, x: Tensor) -> Tensor:
        """Encode a floating vector as uint8 [size(n)]; `x` does not change."""

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return the n elements of `data` as a new vector [n]. Raises ConfigError if `data` has another length."""


class HalfPrecision:
    """A codec that rounds each element to 16 bits (fp16 or bf16)."""

    def __init__(self, code: int, dtype: torch.dtype) -> None:
        self.code, self._dtype = code, dtype

    def size(self, n: int) -> int:
        """Return the bytes of n encoded elements: 2 each."""
        return 2 * n

    def encode(self, x: Tensor) -> Tensor:
        """Clip the elements of `x` to the range of the 16-bit type and round them; return the bytes."""
        return _convert_within(x, self._dtype).view(torch.uint8)

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return the n elements as a new vector of `dtype`. Raises ConfigError if `data` has another length."""
        _must_be(data, self.size(n), n)
        return data.view(self._dtype).to(dtype, copy=True)


class BlockQuantized:
    """The codec int8: 8 bits for each element, and one float32 scale for each block of 1024 elements."""

    code = 3

    def size(self, n: int) -> int:
        """Return the bytes of n encoded elements: 1 each, and 4 for each block's scale."""
        return n + 4 * _count_blocks(n)

    def encode(self, x: Tensor) -> Tensor:
        """Encode a floating vector as uint8: first the scales of all blocks, then the elements."""
        n = x.numel()
        rows = torch.zeros(_count_blocks(n), BLOCK, dtype=torch.float32, device=x.device)
        rows.view(-1)[:n] = _convert_within(x, torch.float32)
        if n == 0:
            return rows.view(torch.uint8).view(-1)
        scales = torch.maximum(rows.amax(1), rows.amin(1).neg_()).div_(127)
        steps = torch.where(scales == 0, 1.0, scales)  # a scale of 0: the block has only zeros
        # a block with NaN or infinity has a scale that is not finite, so `decode` returns NaN for the whole block
        rows.div_(steps[:, None]).round_().clamp_(-127, 127).nan_to_num_(0.0)
        return torch.cat([scales.view(torch.uint8), rows.view(-1)[:n].to(torch.int8).view(torch.uint8)])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return the n elements as a new vector of `dtype`. Raises ConfigError if `data` has another length."""
        _must_be(data, self.size(n), n)
        head = 4 * _count_blocks(n)
        wide, whole = torch.promote_types(dtype, torch.float32), n // BLOCK * BLOCK
        scales, x = data[:head].view(torch.float32).to(wide), data[head:].view(torch.int8).to(wide)
        x[:whole].view(-1, BLOCK).mul_(scales[: n // BLOCK, None])
        if whole < n:
            x[whole:].mul_(scales[-1])
        return x.to(dtype)


class TopK:
    """A codec that keeps only the k elements of largest magnitude; k is `fraction` of the elements, at least 1.

    The encoding consists of their indices (int32 [k], ascending) and their values (float32 [k]).
    """

    code = 4

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def size(self, n: int) -> int:
        """Return the bytes of n encoded elements: 8 for each of the k that are kept."""
        return 8 * min(n, max(1, int(self._fraction * n)))

    def encode(self, x: Tensor) -> Tensor:
        """Encode a floating vector as uint8. Raises ConfigError if it has more than 2^31 - 1 elements."""
        k = self.size(x.numel()) // 8
        if x.numel() > torch.iinfo(torch.int32).max:
            raise ConfigError(
                f"top_k encodes vectors of up to 2^31 - 1 elements, and this vector has {x.numel()}: use more shards, "
                "or int8"
            )
        places = _find_largest(x.abs(), k).sort().values
        values = _convert_within(x[places], torch.float32)
        return torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return the n elements as a new vector of `dtype`; elements that were not kept are 0.

        k follows from the length of `data`. Raises ConfigError if `data` is not an encoding of n elements.
        """
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


def find_codec(text: str) -> Codec:
    """Return the codec of an option `compression`: fp16, bf16, int8, top_k or top_k:FRACTION.

    Raises ConfigError if `text` is something else.
    """
    name, fraction = compression_of(text)
    return TopK(fraction) if name == "top_k" else _PLAIN[name]


def decode(code: int, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Decode `data`, which the codec with number `code` encoded, as n elements of `dtype`.

    Raises ConfigError if there is no such codec, or `data` is not an encoding of n elements.
    """
    if code not in _BY_CODE:
        raise ConfigError(
            f"a peer sent a vector in an encoding with the unknown code {code} (known: {sorted(_BY_CODE)}): run the "
            "same version of rayps on all hosts"
        )
    return _BY_CODE[code].decode(data, n, dtype)


def describe_choice(where: str, picked: str, what: str, seconds: dict[str, float] | None = None) -> JsonObject:
    """Return the event that reports which codec compresses the gradients sent to `where` ("ring" or "server").

    `picked` is the codec's name, or "off". Without `seconds`, `what` is the reason for the choice. With `seconds`, a
    measurement decided: `what` is the data that was sent, and `seconds` maps each codec and "off" to its duration.
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
    """The error feedback of one sender: it sums the codec's errors, and adds the sum to the sender's next vector."""

    def __init__(self, codec: Codec, n: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.codec = codec
        self.residual = torch.zeros(n, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def encode(self, x: Tensor, lo: int = 0) -> Tensor:
        """Encode `x`, the elements of the next vector from index `lo` on, after adding their earlier errors to them."""
        rest = self.residual[lo : lo + x.numel()]
        rest += x
        data = self.codec.encode(rest)
        rest -= self.codec.decode(data, rest.numel(), rest.dtype)
        rest.nan_to_num_(0.0, 0.0, 0.0)
        return data


def _convert_within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert `x` to `dtype`; finite values outside the range of `dtype` are clipped to it."""
    limit = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max <= limit or x.numel() == 0:
        return x.to(dtype)
    least, most = torch.aminmax(x)
    if -limit <= least and most <= limit:  # nearly always true; false if `x` has a NaN
        return x.to(dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # bfloat16 cannot represent the limit
    return torch.where(wide.isinf(), wide, wide.clamp(-limit, limit)).to(dtype)


def _find_largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest elements of `x`, in any order; NaN counts as the largest."""
    if x.device.type != "cpu" or k == 0:
        return x.topk(k, sorted=False).indices
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).numpy()
    return torch.from_numpy(np.argpartition(wide, len(wide) - k)[len(wide) - k :])  # ten times as fast as topk


def _count_blocks(n: int) -> int:
    return -(-n // BLOCK)


def _must_be(data: Tensor, size: int, n: int) -> None:
    if data.numel() != size:
        raise ConfigError(f"{data.numel()} bytes do not hold {n} encoded elements, which take {size} bytes")
