"""What noise on updates promises, by Google's accountant of differential privacy."""

from typing import Any

from fedcpsl.errors import InputError
from fedcpsl.federation.protection import Protection


def epsilon(noise: float, times: int, delta: float) -> float:
    """The epsilon, at this delta, of a device that has let go so many updates, against everybody, the server too.

    Two devices are told apart by any difference in their data. Their updates, shortened to the norm `clip`, are at most
    2 clip apart, and the noise has deviation noise * clip: each update is a Gaussian mechanism of multiplier noise/2.
    """
    if not times:
        return 0.0
    dp = _accounting()
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(noise / 2), times))
    return float(accountant.get_epsilon(delta))


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise InputError("noise: epsilon is counted by dp-accounting; run: pip install 'fedcpsl[privacy]'") from None
    return dp_accounting


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InputError(f"delta = {delta:g}: give a number between 0 and 1, for example 1e-5")
    _accounting()


def strictest(one: Protection, other: Protection) -> Protection:
    """What satisfies both: the smaller norm, the larger deviation of the noise."""
    clip = min(filter(None, (one.clip, other.clip)), default=0.0)
    deviation = max(one.clip * one.noise, other.clip * other.noise)
    return Protection(clip, deviation / clip if clip else 0.0)
