"""Whether adapters are trained in place of the weights, and of what size."""

from collections.abc import Iterator
from dataclasses import dataclass

from tooljax.config.types import CountOrZero, Positive

Problem = tuple[tuple[str, ...], str]

ALL_LINEAR = "all-linear"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a decoder layer by their Hugging Face names, in the order of a checkpoint."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685) are trained in place of the weights, which stay as they were loaded and are
    the reference policy too."""

    rank: CountOrZero = 0
    """Of every adapter. 0: no adapters, all weights are trained."""
    alpha: Positive = 16.0
    """Adapters are multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """By alpha / sqrt(rank) instead (arXiv:2312.03732), so that a larger rank does not make updates smaller."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Linear layers that get one: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; all-linear is all of
    them. Embedding, LM head, norms and biases get none."""
    adapter: str = ""
    """PEFT folder (adapter_config.json, adapter_model.safetensors) to go on from; it must have this rank, alpha and
    targets. Empty: new adapters, which begin at the weights of model.path."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The targets by name, in the order of a checkpoint."""
        return tuple(name for name in MODULES if name in self.targets or ALL_LINEAR in self.targets)


def lora_problems(lora: LoraConfig) -> Iterator[Problem]:
    """What is wrong with these settings."""
    unknown = [name for name in lora.targets if name not in (*MODULES, ALL_LINEAR)]
    if unknown:
        yield (
            ("lora.targets",),
            f"lora.targets={lora.targets}: {unknown[0]!r} is no linear layer of a decoder; choose from "
            f"{', '.join(MODULES)}, or {ALL_LINEAR}",
        )
    elif lora.rank and not lora.targets:
        yield (
            ("lora.targets", "lora.rank"),
            f"lora.targets=() leaves nothing to train with lora.rank={lora.rank}; name some, or set lora.rank = 0 to "
            "train all weights",
        )
    if lora.adapter and not lora.rank:
        yield (
            ("lora.adapter", "lora.rank"),
            f"lora.adapter={lora.adapter!r} is not read with lora.rank=0; set lora.rank, lora.alpha and lora.targets "
            "as its adapter_config.json has them",
        )
