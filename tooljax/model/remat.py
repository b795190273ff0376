"""What the backward pass finds of a layer's forward pass, and what it computes again, by name.

    none            finds all activations
    dots_attention  finds products with weights and what attention gave; what is elementwise is computed again
    dots            finds products with weights; attention and what is elementwise is computed again
    attention       finds what attention gave, and the log of its softmax's denominator
    offload         finds what "dots" finds, but in the host's memory
    full            finds the layer's input

In that order memory falls and work rises, but for "offload", whose price is the way to the host and back. All give the
same gradients.
"""

from collections.abc import Callable
from typing import Any, get_args

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from tooljax.config.types import Remat as Remat
from tooljax.sharding import GATHERED, HOST_MEMORY, Layout

ATTENDED = "attended"
"""Name of what attention gives, for "attention"."""

_CUDNN = "dot_product_attention_fwd"
"""cuDNN's forward pass, whose results cannot be given names: gradients are made of them inside JAX."""


def attended(x: Array) -> Array:
    """Marks a result of attention that its gradient needs."""
    return checkpoint_name(x, ATTENDED)


def rematerialised(layer: Callable, layout: Layout, remat: Remat) -> Callable:
    """The layer, with a backward pass as the name says. ValueError: an unknown name, or a backend that has no such
    memory."""
    check_remat(remat, layout)
    policies = jax.checkpoint_policies
    if remat == "none":
        # All is kept but the gathered weights, which would be a whole copy of the model on every device.
        gathered = policies.save_anything_except_these_names(GATHERED)
        return jax.checkpoint(layer, policy=gathered) if layout.gathers else layer
    # Products with weights have no batch axis; those of attention have.
    policy: Callable | None = {
        "dots_attention": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, _attention_saveable
        ),
        "dots": policies.dots_with_no_batch_dims_saveable,
        "attention": _attention_saveable,
        "offload": policies.offload_dot_with_no_batch_dims("device", HOST_MEMORY),
        "full": None,
    }[remat]
    return jax.checkpoint(layer, policy=policy)


def check_remat(remat: str, layout: Layout) -> None:
    """ValueError unless the layout's devices can do it."""
    if remat not in get_args(Remat):
        raise ValueError(f"model.remat={remat!r} is unknown; choose one of {[*get_args(Remat)]}")
    if remat == "offload":
        layout.check_host_memory("model.remat='offload'", "choose 'dots' or 'full'")


def _attention_saveable(prim: Any, *inputs: Any, **params: Any) -> bool:
    del inputs
    return params.get("name") == ATTENDED or str(prim).startswith(_CUDNN)
