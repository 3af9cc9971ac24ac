"""Weights of counted updates in theta alone: against the bias of outage, and by staleness."""

import numpy as np
from numpy.typing import NDArray

from fedcpsl.edge.radio import Numbers


def inverse_weight(lost_chance: Numbers, counted: int, drawn: int, cap: float) -> Numbers:
    """w_i = min(1 / (1 - P_i), cap) m_counted / m_drawn: N/m is then over the drawn; the two are unbiased."""
    with np.errstate(divide="ignore"):
        found: Numbers = np.minimum(1 / (1 - lost_chance), cap) * counted / max(drawn, 1)
    return found


def staleness_weight(rounds: NDArray[np.int64], power: float) -> Numbers:
    """w_i = (1 + s_i)^-a, of an update that is s_i rounds late."""
    found: Numbers = (1.0 + rounds.astype(np.float64)) ** -power
    return found
