"""Adam (Kingma and Ba, 2015), for algorithms whose devices or servers use it."""

from torch import Tensor

EPS = 1e-8
Betas = tuple[float, float]


def adam_moments(m: Tensor, v: Tensor, g: Tensor, betas: Betas) -> tuple[Tensor, Tensor]:
    """m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2."""
    return betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g.square()


def adam_direction(m: Tensor, v: Tensor, updates: Tensor, betas: Betas) -> Tensor:
    """m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + 1e-8), k being the number of updates with this one."""
    return m / (1 - betas[0] ** updates) / ((v / (1 - betas[1] ** updates)).sqrt() + EPS)
