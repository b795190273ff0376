"""Other implementations of a head's cross entropy, on the same inputs: in JAX, torch.compile, Liger and Apple's CCE."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from support.gpu_timing import MIB, Candidate

CHUNK = 1024

# --- JAX ------------------------------------------------------------------------------------------------------------


def materialised(hidden, head, targets):
    """Log-probs, with all float32 logits in memory."""
    logits = jnp.einsum("TD,VD->TV", hidden, head, preferred_element_type=jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]


def checkpointed(hidden, head, targets):
    """Log-probs, with the float32 logits of 1024 tokens in memory, recomputed for the gradient."""
    of_chunk = jax.checkpoint(lambda part: materialised(part[0], head, part[1]))
    parts = hidden.reshape(-1, CHUNK, hidden.shape[1]), targets.reshape(-1, CHUNK)
    return jax.lax.map(of_chunk, parts).reshape(-1)


# --- torch ----------------------------------------------------------------------------------------------------------


def torch_peers(vocab: int) -> dict[str, Callable[[], Callable]]:
    """By name: makes a function of hidden, head and targets that gives the mean loss; ImportError if it is missing.

    Names that say "backward" are timed with their gradients only.
    """
    return {
        "torch.compile, logits materialised": _torch_compile,
        "Liger, Triton, fused linear cross entropy": _liger,
        "Liger, CuTe for SM90, fused linear cross entropy, backward": lambda: _liger_sm90(vocab),
        "Apple CCE": lambda: _cce("cce"),
        "Apple CCE without its gradient filter, backward": lambda: _cce("cce_exact"),
    }


def _torch_compile():
    import torch

    def loss(hidden, head, targets):
        return torch.nn.functional.cross_entropy((hidden @ head.T).float(), targets)

    return torch.compile(loss, dynamic=False)


def _liger():
    from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyFunction,
    )

    # Its defaults by position, up to ce_impl: with CuTe installed it would choose that for the cross entropy.
    defaults = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False)

    def loss(hidden, head, targets):
        found: Any = LigerFusedLinearCrossEntropyFunction.apply(
            hidden, head, targets, *defaults, "nvidia-triton"
        )
        return found[0] if isinstance(found, tuple) else found

    return loss


def _liger_sm90(vocab: int):
    if vocab % 256:
        raise NotImplementedError(f"it takes vocabularies that are multiples of 256, not {vocab}")
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropySM90Function,
    )

    return LigerFusedLinearCrossEntropySM90Function.apply


def _cce(kind: str):
    from cut_cross_entropy import (  # pyright: ignore[reportMissingImports]
        linear_cross_entropy,
    )

    return lambda hidden, head, targets: linear_cross_entropy(hidden, head, targets, impl=kind)


def torch_candidate(make: Callable[[], Callable], args: tuple, flops: float, backward: bool):
    """The mean loss, and with `backward` its gradients for hidden and head, on JAX's own arrays."""
    import torch

    function = make()
    hidden, head, targets = (torch.from_dlpack(array).detach() for array in args)
    targets = targets.long()
    for leaf in (hidden, head) if backward else ():
        leaf.requires_grad_()

    def once():
        hidden.grad = head.grad = None
        with torch.set_grad_enabled(backward):
            loss = function(hidden, head, targets)
            if backward:
                loss.backward()
        torch.cuda.synchronize()
        return loss.detach()

    for _ in range(3):
        loss = once()
    hidden.grad = head.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    loss = once()
    outputs = 2 * (hidden.numel() + head.numel()) if backward else 0
    workspace = (torch.cuda.max_memory_allocated() - base - outputs) / MIB

    def call():
        once()
        hidden.grad = head.grad = None

    return Candidate(call, flops, max(workspace, 0.0), float(loss))


def torch_product(m: int, k: int, n: int, repeats: int = 20) -> dict:
    """Milliseconds and TFLOP/s of torch's bfloat16 product."""
    import torch

    a = torch.randn((m, k), device="cuda", dtype=torch.bfloat16)
    b = torch.randn((n, k), device="cuda", dtype=torch.bfloat16).T
    product = torch.matmul
    for _ in range(3):
        product(a, b)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        product(a, b)
    end.record()
    torch.cuda.synchronize()
    ms = begin.elapsed_time(end) / repeats
    return {"ms": ms, "tflops": 2 * m * k * n / ms / 1e9}
