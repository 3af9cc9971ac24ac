"""Theorems 1 and 2 of the paper as numbers: the maximum step sizes, and the bounds that hold for them.

Pure functions of constants that the reader must supply (they are bounds over all of space, not measurements).
Local variables are the paper's symbols: Q is the maximum Q~ of all devices and rounds, q the minimum, eta~ = eta eta_g.
The docstring says so if a formula differs from the printed one; the paper's "rho" is 1.
"""

from collections.abc import Sequence
from math import inf, sqrt
from typing import NamedTuple


class Constants(NamedTuple):
    """The constants of Theorem 1; Theorem 2 also needs `PersonalConstants`."""

    L: float  # every f_i is L-smooth in (theta, nu_i) together (Assumption 3)
    N: int  # devices
    m: int  # active devices in a round, drawn uniformly
    eta_g: float
    Q_max: float  # the largest Q~ of all devices and rounds
    Q_min: float  # the smallest
    sigma: float = 0.0  # sigma^2/S bounds the variance of a minibatch gradient (Assumption 4); 0: full batches
    S: float = 1.0  # samples in a minibatch, S_l + S_u


class PersonalConstants(NamedTuple):
    """The constants that only Theorem 2 needs."""

    L_F: float  # every F_i is L_F-smooth (Assumption 3)
    L_tilde: float  # the cost as a function of (h, nu) is L~-smooth, and
    mu: float  # strongly convex in each of the two (Assumption 2)
    L_h: float  # h(theta; .) is L_h-smooth
    Gamma: float  # maximum distance of two outputs of h (Assumption 5); 2 is always valid
    weights: Sequence[float]  # omega_i
    beta: Sequence[float]  # beta_i


class Start(NamedTuple):
    """The start of a run, and a lower bound of its objective."""

    objective: float  # f(theta^0, nu^0)
    potential: float  # P^0
    lowest: float = 0.0  # the f_ of Assumption 1; the default cost is never negative


class PersonalBound(NamedTuple):
    """The right-hand side of Theorem 2 and its terms."""

    start: float  # decreases as 1/R
    a: float  # minibatch noise in theta_lc
    b: float  # minibatch noise in theta
    c: float  # the same, through P
    d: float  # pseudo-labels that change
    e: float  # a global model that changes
    total: float


def eta_v_limit(L: float) -> float:
    """eta_v <= 1/(4 L): the largest step of pseudo-labels by gradient (Theorem 1)."""
    return 1 / (4 * L)


def eta_limit(constants: Constants) -> float:
    """eta <= min{m/(48 eta_g N L), 1/(8 L Q), 3 eta_g N/(100 m L Q^2), m/(32 eta_g N L) (1 + 2 N/m)^(-1/2)}.

    The largest local step size of Theorem 1. As m <= N, the third or the fourth is always the minimum.
    (Where L < 1/192, Theorem 1 also needs eta eta_g <= 4 m/N; above that it follows from the first.)
    """
    L, N, m, eta_g, Q = constants[:5]
    return min(
        m / (48 * eta_g * N * L),
        1 / (8 * L * Q),
        3 * eta_g * N / (100 * m * L * Q**2),
        m / (32 * eta_g * N * L) / sqrt(1 + 2 * N / m),
    )


def potential(constants: Constants, eta: float, objective: float, control_error: float) -> float:
    """P^r = f(theta^r, nu^r) + 24 (eta eta_g)^2 (N/m)^2 L Xi^r: it decreases from round to round in the proofs."""
    L, N, m, eta_g = constants[:4]
    return objective + 24 * (eta * eta_g) ** 2 * (N / m) ** 2 * L * control_error


def noise(constants: Constants, eta: float) -> float:
    """12 eta eta_g N L sigma^2/(m S) (259/64 + m/N + 5 eta m L Q^2/(24 eta_g N)): from minibatches, in both theorems.

    It is the maximum increase of P in a round, divided by eta eta_g.
    """
    L, N, m, eta_g, Q, _, sigma, S = constants
    factor = 259 / 64 + m / N + 5 * eta * m * L * Q**2 / (24 * eta_g * N)
    return 12 * eta * eta_g * N * L * sigma**2 / (m * S) * factor


def gap_bound(constants: Constants, eta: float, start: Start, rounds: int) -> float:
    """4 (P^0 - f_)/(eta eta_g R) + 4 noise: Theorem 1's bound on the mean of E[G] over rounds 0 to R - 1.

    The paper prints the noise without its 4. Its proof has P^{r+1} - P^r <= -(eta~/4) G + eta~ noise and then
    multiplies by 4/eta~ all but the noise; Theorem 2's proof, from the same line, carries the 4.
    """
    return 4 * (start.potential - start.lowest) / (eta * constants.eta_g * rounds) + 4 * noise(constants, eta)


def mixing(L: float, personal: PersonalConstants) -> float:
    """D_0 = (1/4) sum_i omega_i (1 - beta_i) (4 beta_i L~ L_h Gamma + 5 L): the effect of theta on the mixtures."""
    _, L_tilde, _, L_h, Gamma, weights, beta = personal
    each = zip(weights, beta, strict=True)
    return sum(w * (1 - b) * (4 * b * L_tilde * L_h * Gamma + 5 * L) for w, b in each) / 4


def mixing_limit(constants: Constants) -> float:
    """D_0 <= 11 L/8 + 11 L m/(2 N): the condition of Theorem 2 on beta.

    The paper prints the second term without L, which its proof (that D_2 >= 0) drops.
    """
    return 11 * constants.L / 8 + 11 * constants.L * constants.m / (2 * constants.N)


def personal_eta_limit(constants: Constants, personal: PersonalConstants) -> float:
    """eta <= min{Theorem 1's limit, m/(48 eta_g N D_0)}: the largest local step size of Theorem 2."""
    D_0 = mixing(constants.L, personal)
    return min(eta_limit(constants), constants.m / (48 * constants.eta_g * constants.N * D_0) if D_0 else inf)


def eta_c_limit(constants: Constants, personal: PersonalConstants, eta: float) -> float:
    """eta_c <= min{1/(2 Q L_F), eta eta_g N L^2/(q m L_F^2), eta eta_g N/(q m)}: for the localized model."""
    L, N, m, eta_g, Q, q, *_ = constants
    L_F = personal.L_F
    return min(
        1 / (2 * Q * L_F),
        eta * eta_g * N * L**2 / (q * m * L_F**2),
        eta * eta_g * N / (q * m),
    )


def personal_gap_bound(
    constants: Constants, personal: PersonalConstants, eta: float, eta_c: float, start: Start, rounds: int
) -> PersonalBound:
    """(3 N (f^0 - f_) + 11/2 N (P^0 - f_))/(eta_c q m R) + (a) + (b) + (c) + (d) + (e): Theorem 2's bound.

    It is on the mean of E[personal gap] over rounds 0 to R - 1. All localized models start at theta^0, where
    sum_i omega_i F_i is f. The terms, in the paper's letters:

        (a) 3 eta_c L_F (eta_c L_F + 1) Q sigma^2/(2 S)
        (b) 3 (eta eta_g)^2 N^2 sigma^2/(2 eta_c q m^2 S)
        (c) 11 eta eta_g N/(2 eta_c q m) noise
        (d) 3 L~^2 Gamma^2/(2 eta_c q L) sum_i omega_i beta_i^2
        (e) 3 N Gamma^2/(eta_c q m) sum_i omega_i beta_i (1 - beta_i) (beta_i (L~ - mu) + L~)

    Neither (d) nor (e) decreases with R. The proof also uses L_F <= (1 - beta_i) L, which the theorem does not state.
    """
    L, N, m, eta_g, Q, q, sigma, S = constants
    L_F, L_tilde, mu, _, Gamma, weights, beta = personal
    variance, per_round = sigma**2 / S, N / (eta_c * q * m)  # the second: divided by the change of theta_lc in a round
    each = list(zip(weights, beta, strict=True))
    terms = (
        per_round * (3 * (start.objective - start.lowest) + 11 / 2 * (start.potential - start.lowest)) / rounds,
        3 * eta_c * L_F * (eta_c * L_F + 1) * Q * variance / 2,
        per_round * 3 * (eta * eta_g) ** 2 * N / (2 * m) * variance,
        per_round * 11 / 2 * eta * eta_g * noise(constants, eta),
        3 * L_tilde**2 * Gamma**2 / (2 * eta_c * q * L) * sum(w * b**2 for w, b in each),
        per_round * 3 * Gamma**2 * sum(w * b * (1 - b) * (b * (L_tilde - mu) + L_tilde) for w, b in each),
    )
    return PersonalBound(*terms, total=sum(terms))
