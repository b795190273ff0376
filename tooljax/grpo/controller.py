"""The weight of the KL term from step to step: fixed, or steered towards a target (Ziegler et al., arXiv:1909.08593,
section 2.2):

    coef <- coef (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)

n is the number of trajectories that the KL was measured on.
"""

import math
from dataclasses import dataclass

_MAX_ERROR = 0.2


@dataclass
class KlController:
    """The weight that the next step uses. A checkpoint keeps it; the rest is the config's."""

    coef: float
    target: float | None = None
    """KL to steer to, in nats a token. None: the weight is fixed."""
    horizon: float = 10_000.0
    """Trajectories in which the weight grows or falls by at most a factor of about e^0.2."""

    def steer(self, kl: float, trajectories: int) -> None:
        """After a step whose trajectories had that mean KL to the reference. What is not a number steers nowhere."""
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
            self.coef *= 1.0 + error * trajectories / self.horizon

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"coef": self.coef}

    def restore(self, state: dict[str, float]) -> None:
        """Goes on from a checkpoint. A weight that is fixed is the config's, which may have changed since."""
        if self.target is not None:
            self.coef = float(state["coef"])
