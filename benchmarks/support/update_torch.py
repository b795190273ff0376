"""The peer of benchmarks/update_mfu.py: the same update of the same batch in torch, as fast as it goes.

transformers' Qwen2 layers, each through torch.compile; the fastest attention that keeps packed trajectories apart; a
head that makes the loss and its gradients in one pass over chunks of tokens; fused AdamW on float32 master weights.
"""

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.update_case import SIZES, Case, category, make_case, timed
from support.update_profile import attempt, print_table

CHUNK = 4096
"""Tokens whose logits are in memory."""
CLIP = 0.2
GIB = 2**30
_TORCH: Any = torch
"""Its operations on lists of tensors have no types."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm_up", type=int, default=2)
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    case = make_case(args.size, args.rows)
    told: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "product_tflops": product_tflops(),
        "tokens": case.tokens.size,
    }
    ways = itertools.product((False,) if args.no_compile else (True, False), (False, True))
    for compiled, checkpointed in ways:
        try:
            told |= measure(args, case, compiled=compiled, checkpointed=checkpointed)
            break
        except torch.OutOfMemoryError as error:
            print(f"checkpointing {checkpointed}: {str(error)[:160]}", file=sys.stderr)
        except Exception as error:
            if not compiled:
                raise
            print(f"compiled: {type(error).__name__} {str(error)[:300]}", file=sys.stderr)
            torch._dynamo.reset()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(told))


def measure(args, case: Case, *, compiled: bool, checkpointed: bool) -> dict[str, Any]:
    """Times updates; raises what torch raises where this way does not go."""
    trainer = Trainer(args.size, case, compiled=compiled, checkpointed=checkpointed)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    told = timed(trainer.update, warm_up=args.warm_up, steps=args.steps)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    if args.profile:
        attempt(lambda: _profile(trainer))
    how = [trainer.attention, "compiled" if compiled else "eager"]
    how += ["checkpointed"] * checkpointed
    return {**told, "what": ", ".join(how), "peak_gib": peak / GIB, "loss": trainer.loss}


class Trainer:
    """bfloat16 weights that compute, float32 ones that learn."""

    def __init__(self, size: str, case: Case, *, compiled: bool, checkpointed: bool):
        self.case = case
        self.checkpointed = checkpointed
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model: Any = transformers.Qwen2ForCausalLM(_config(size))
        self.model = model.to(torch.bfloat16).train()
        self.attention = choose_attention(model.config, case.lengths)
        model.config._attn_implementation = "packed"
        # Without it JAX's side would compile and this one would not.
        wrap: Callable = torch.compile if compiled else (lambda f, **_: f)
        if compiled:
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        self.pieces = wrap(loss_pieces, dynamic=False)
        self.log_softmax = wrap(picked_log_probs, dynamic=False)
        self.weights: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.weights]
        self.sums = [torch.zeros_like(p) for p in self.masters]
        for master, total in zip(self.masters, self.sums, strict=True):
            master.grad = total
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.01, fused=DEVICE == "cuda"
        )
        self.tokens = torch.from_numpy(case.tokens).to(DEVICE).long()
        self.positions = torch.cat([torch.arange(n) for n in case.lengths])[None].to(DEVICE)
        # The hidden state at t - 1 predicts token t.
        mask = torch.from_numpy(case.mask.copy()).to(DEVICE)
        self.at = [torch.nonzero(row)[:, 0] - 1 for row in mask]
        self.advantages = [
            torch.repeat_interleave(torch.from_numpy(a), torch.tensor(case.lengths)).to(DEVICE)
            for a in case.advantages
        ]
        self.share = 1.0 / int(case.mask.sum())
        self.loss = 0.0

    def update(self) -> None:
        """Old log-probs of all rows, then loss and gradients row by row, then AdamW."""
        rows = range(len(self.tokens))
        with torch.no_grad():
            old = [self.log_probs(row) for row in rows]
        total = torch.zeros((), device=DEVICE)
        for row in rows:
            at = self.at[row]
            hidden = self.hidden(row)[0, at]
            given = self.tokens[row, at + 1], old[row], self.advantages[row][at + 1]
            head = self.model.lm_head.weight
            loss: Any = OnePass.apply(self.pieces, self.share, hidden, head, *given)
            loss.backward()
            total += loss.detach()
            gradients = [weight.grad for weight in self.weights]
            _TORCH._foreach_add_(self.sums, gradients)
            for weight in self.weights:
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            _TORCH._foreach_copy_(self.weights, self.masters)
            _TORCH._foreach_zero_(self.sums)
        self.loss = float(total)  # waits for the device

    def hidden(self, row: int) -> torch.Tensor:
        """[1, time, embed] after the last norm."""
        model = self.model.model
        x = model.embed_tokens(self.tokens[row : row + 1])
        rotary = model.rotary_emb(x, self.positions)

        def run(layer, x):
            out = layer(x, attention_mask=None, position_embeddings=rotary, use_cache=False)
            return out[0] if isinstance(out, tuple) else out

        for layer in model.layers:
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(run, layer, x, use_reentrant=False)
            else:
                x = run(layer, x)
        return model.norm(x)

    def log_probs(self, row: int) -> torch.Tensor:
        """Of the loss tokens of a row."""
        at, head = self.at[row], self.model.lm_head.weight
        hidden, targets = self.hidden(row)[0, at], self.tokens[row, at + 1]
        chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        return torch.cat([self.log_softmax(h @ head.T, t) for h, t in chunks])


def _config(size: str) -> Any:
    shape = SIZES[size]
    return transformers.Qwen2Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["embed"],
        intermediate_size=shape["ffw"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        use_sliding_window=False,
    )


# --- the head -------------------------------------------------------------------------------------------------------


def picked_log_probs(logits, targets):
    """In float32."""
    logits = logits.float()
    picked = logits.gather(1, targets[:, None])[:, 0]
    return picked - torch.logsumexp(logits, 1)


def loss_pieces(logits, targets, old, advantages, share: float):
    """Of a chunk: the clipped loss, and the gradient of the logits in their dtype."""
    wide = logits.float()
    normaliser = torch.logsumexp(wide, 1)
    log_probs = wide.gather(1, targets[:, None])[:, 0] - normaliser
    ratio = torch.exp(log_probs - old)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum() * share
    inside = ratio * advantages <= clipped * advantages
    slope = torch.where(inside, -ratio * advantages, 0.0) * share
    columns = torch.arange(logits.shape[1], device=logits.device)
    softmax = torch.exp(wide - normaliser[:, None])
    is_target = (columns[None] == targets[:, None]).float()
    return loss, (slope[:, None] * (is_target - softmax)).to(logits.dtype)


class OnePass(torch.autograd.Function):
    """The loss, with gradients of hidden states and head made in the forward pass."""

    @staticmethod
    def forward(ctx, pieces, share, hidden, head, targets, old, advantages):
        total = torch.zeros((), device=hidden.device)
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        for start in range(0, len(targets), CHUNK):
            part = slice(start, start + CHUNK)
            logits = hidden[part] @ head.T
            loss, d_logits = pieces(logits, targets[part], old[part], advantages[part], share)
            total += loss
            torch.mm(d_logits, head, out=d_hidden[part])
            d_head += d_logits.T @ hidden[part]
        ctx.save_for_backward(d_hidden, d_head.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx, *cotangents):
        (cotangent,) = cotangents
        d_hidden, d_head = ctx.saved_tensors
        return None, None, d_hidden * cotangent, d_head * cotangent, None, None, None


# --- attention ------------------------------------------------------------------------------------------------------


def choose_attention(config: Any, lengths: tuple[int, ...]) -> str:
    """Registers the fastest as transformers' "packed", by forward and backward over one row."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    head_dim = config.hidden_size // heads
    shape = (1, heads, sum(lengths), head_dim)
    q = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn_like(q[:, :kv]).requires_grad_() for _ in range(2))
    found: dict[str, float] = {}
    ways = attention_ways(lengths)
    for name, attend in ways.items():
        with contextlib.suppress(Exception):
            found[name] = _time_attention(attend, q, k, v)
    told = ", ".join(f"{name} {ms:.2f} ms" for name, ms in found.items())
    print(f"attention of a row and layer, forward and backward: {told}")
    best = min(found, key=lambda name: found[name])
    attend = ways[best]

    def packed(module, query, key, value, attention_mask, **options):
        del module, attention_mask, options
        return attend(query, key, value), None

    transformers.AttentionInterface.register("packed", packed)
    return best


def attention_ways(lengths: tuple[int, ...]) -> dict[str, Callable]:
    """By name: of q [1 N T H], k and v [1 K T H] to [1 T N H], causal within each of the lengths."""
    ends = [0, *itertools.accumulate(lengths)]
    starts = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    longest = max(lengths)

    def each(q, k, v):
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        parts = [
            F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True)
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)

    def varlen(q, k, v):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False
        )
        return out[0][None]

    def package(q, k, v):
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Any = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True)
        return out[None]

    def by(backend):
        def attend(q, k, v):
            with torch.nn.attention.sdpa_kernel(backend):
                return each(q, k, v)

        return attend

    if DEVICE == "cpu":
        return {"SDPA of each trajectory": each}
    backends = torch.nn.attention.SDPBackend
    return {
        "torch's varlen flash attention": varlen,
        "flash-attn's varlen": package,
        "flash SDPA of each trajectory": by(backends.FLASH_ATTENTION),
        "cuDNN SDPA of each trajectory": by(backends.CUDNN_ATTENTION),
    }


def _time_attention(attend: Callable, q, k, v, repeats: int = 5) -> float:
    """Milliseconds."""
    best = float("inf")
    for _ in range(3):
        _wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            out = attend(q, k, v)
            torch.autograd.grad(out, (q, k, v), out.detach())
        _wait()
        best = min(best, (time.perf_counter() - begun) / repeats * 1e3)
    return best


# --- small parts ----------------------------------------------------------------------------------------------------


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def product_tflops(size: int = 8192, repeats: int = 20) -> float:
    """Of bfloat16 products of square matrices, a second; on a CPU of small ones."""
    if DEVICE == "cpu":
        size, repeats = 512, 2
    a = torch.randn((size, size), device=DEVICE, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(4):
        _wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, a)
        _wait()
        best = min(best, (time.perf_counter() - begun) / repeats)
    return 2 * size**3 / best / 1e12


def _profile(trainer: Trainer) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] * (DEVICE == "cuda")
    with profile(activities=activities) as trace:
        trainer.update()
    kernels: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    counted: Any
    for event in trace.key_averages():
        on_device = getattr(event, "self_device_time_total", 0)
        took = on_device if DEVICE == "cuda" else event.self_cpu_time_total
        if DEVICE == "cuda" and event.device_type != _TORCH.autograd.DeviceType.CUDA:
            continue
        for counted, key in ((kernels, event.key[:120]), (kinds, category(event.key))):
            counted[key] += took / 1e3
    print_table("torch, kinds of kernels", kinds, sum(kinds.values()) or 1.0)
    print_table("torch, longest kernels", kernels, sum(kernels.values()) or 1.0)


if __name__ == "__main__":
    main()
