"""Which matrix products of a tower's blocks run in fp8.

Owns the policy, what it asks of the device and of a tower's sizes, and how it enters the model's fingerprint:
rows of two precisions never share a key. Leaves the arithmetic to ``products``.

Patch embedding, mergers and projector have no fp8 form: they are a few percent of the work, and the rows
themselves come out of them.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch
from blake3 import blake3

from encoder_service.errors import ConfigurationError

ProductName = Literal["qkv", "proj", "fc1", "fc2"]
PRODUCT_NAMES: tuple[ProductName, ...] = ("qkv", "proj", "fc1", "fc2")

FINGERPRINT_TAG = b"vision_encoder.precision.v1"
# e4m3 products came with these: Ada, then Hopper.
MIN_CAPABILITY = (8, 9)
# torch._scaled_mm: both sides of a weight, in elements, which is 16-byte alignment of e4m3 rows.
SIDE_MULTIPLE = 16


@dataclass(frozen=True)
class Precision:
    """fp8_products: the products that run in fp8; none leaves everything in the weights' own type.
    wide_share: this share of the blocks, from the first on, stays in it too, and so do wide_blocks, where
    negative numbers count from the last. fast_accumulation: sums stay in the tensor cores' narrower register
    instead of being added up in float32 every few steps."""

    fp8_products: Set[ProductName] = frozenset()
    wide_share: float = 0.0
    wide_blocks: Set[int] = frozenset()
    fast_accumulation: bool = True

    @property
    def name(self) -> str:
        """As the setting names it: ``dtype`` or ``fp8``."""
        return "fp8" if self.fp8_products else "dtype"

    def is_fp8(self, product: ProductName, index: int, depth: int) -> bool:
        """Whether this product of block ``index`` of ``depth`` runs in fp8."""
        is_wide = index < int(self.wide_share * depth) or self.wide_blocks & {index, index - depth}
        return product in self.fp8_products and not is_wide

    def fingerprint(self, model_fingerprint: bytes) -> bytes:
        """The model's fingerprint under this precision, 32 bytes: the same one unless fp8 is used, another
        for every policy."""
        if not self.fp8_products:
            return model_fingerprint
        text = (
            f"fp8 products={','.join(sorted(self.fp8_products))}"
            f" wide_share={self.wide_share}"
            f" wide_blocks={','.join(str(index) for index in sorted(self.wide_blocks))}"
            f" fast_accumulation={self.fast_accumulation}"
        )
        digest: bytes = blake3(FINGERPRINT_TAG + model_fingerprint + text.encode()).digest()
        return digest


AS_DTYPE = Precision()
# By measuring on full-size towers with random weights: the two products of the MLP are two thirds of a
# block's work for two fifths of its error, and the first blocks' errors grow through all the others.
FP8 = Precision(frozenset({"fc1", "fc2"}), wide_share=0.4)
# Everything that has an fp8 form: the fastest, and not near enough to serve unmeasured.
FP8_EVERYWHERE = Precision(frozenset(PRODUCT_NAMES))


def parse_precision(setting: Literal["dtype", "fp8"]) -> Precision:
    """The policy behind a setting."""
    return FP8 if setting == "fp8" else AS_DTYPE


def check_fp8_device(device: torch.device) -> None:
    """Raises ConfigurationError unless the device has fp8 products."""
    needed = ".".join(map(str, MIN_CAPABILITY))
    if device.type != "cuda":
        raise ConfigurationError(
            f"precision fp8 needs a CUDA device of compute capability {needed} or above, not {device}"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise ConfigurationError(
            f"precision fp8 needs compute capability {needed} or above, {device} has "
            f"{'.'.join(map(str, capability))}"
        )


def check_fp8_sizes(precision: Precision, hidden_size: int, intermediate_size: int, depth: int) -> None:
    """Raises ConfigurationError when a product that is to run in fp8 has sides that fp8 products do not take,
    or when a block that is to stay wide does not exist."""
    sides: dict[ProductName, tuple[int, int]] = {
        "qkv": (hidden_size, 3 * hidden_size),
        "proj": (hidden_size, hidden_size),
        "fc1": (hidden_size, intermediate_size),
        "fc2": (intermediate_size, hidden_size),
    }
    for product in PRODUCT_NAMES:
        num_in, num_out = sides[product]
        if product in precision.fp8_products and (num_in % SIDE_MULTIPLE or num_out % SIDE_MULTIPLE):
            raise ConfigurationError(
                f"precision fp8 needs sides that are multiples of {SIDE_MULTIPLE}, {product} is "
                f"{num_in} x {num_out}"
            )
    for index in sorted(precision.wide_blocks):
        if not -depth <= index < depth:
            raise ConfigurationError(f"block {index} is to stay wide, the tower has {depth} blocks")
