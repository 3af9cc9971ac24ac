"""The radio: how much of what is sent arrives, and how fast. One function per formula, over devices; SI units."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
NEAREST = 10.0  # metres: nobody is nearer to the base station
LIGHT = 299_792_458.0  # metres a second
LOG2 = float(np.log(2))


def watts(dbm: float) -> float:
    """P = 10^((dBm - 30) / 10), in watts."""
    return float(10 ** ((dbm - 30) / 10))


def noise_density(noise_figure_db: float) -> float:
    """N0 = 10^((-174 + NF - 30) / 10), in watts per hertz: thermal noise and the receiver's noise figure NF in dB."""
    return watts(-174 + noise_figure_db)


def distances(radius: float, u: Numbers) -> Numbers:
    """d_i = max(radius sqrt(u), 10): uniform over the cell's area, for u uniform in (0, 1]; metres."""
    return np.maximum(radius * np.sqrt(u), NEAREST)


def macro_path_loss(distance: Numbers, shadowing_db: Numbers) -> Numbers:
    """PL_i = 128.1 + 37.6 log10(d_i / 1000) + X_i, in dB: 3GPP's macro cell at 2 GHz."""
    return 128.1 + 37.6 * np.log10(distance / 1000) + shadowing_db


def free_space_path_loss(distance: Numbers, carrier: float, shadowing_db: Numbers) -> Numbers:
    """PL_i = 20 log10(4 pi d_i f / c) + X_i, in dB: free space, at the carrier's frequency f."""
    found: Numbers = 20 * np.log10(4 * np.pi * distance * carrier / LIGHT) + shadowing_db
    return found


def log_distance_path_loss(distance: Numbers, exponent: float, carrier: float, shadowing_db: Numbers) -> Numbers:
    """PL_i = 20 log10(4 pi f / c) + 10 n log10(d_i) + X_i, in dB: free space up to 1 m, the exponent n from there."""
    reference = free_space_path_loss(np.ones(1), carrier, np.zeros(1))
    return reference + 10 * exponent * np.log10(distance) + shadowing_db


def gain(path_loss_db: Numbers) -> Numbers:
    """g_i = 10^(-PL_i / 10)."""
    found: Numbers = 10 ** (-path_loss_db / 10)
    return found


def rayleigh(u: Numbers) -> Numbers:
    """a_i = -log(u): abs(h)^2 ~ Exp(1), for u uniform in (0, 1]."""
    found: Numbers = -np.log(u)
    return found


def rate(
    bandwidth: Numbers | float, power: float, gain: Numbers, fading: Numbers, noise: float, interference: float = 0.0
) -> Numbers:
    """r_i = W_i log2(1 + p_i g_i a_i / (W_i N0 + I)), in bits a second."""
    found: Numbers = bandwidth * np.log1p(power * gain * fading / (bandwidth * noise + interference)) / LOG2
    return found


def transmission_seconds(bits: Numbers | float, rate: Numbers) -> Numbers:
    """t_i = b_i / r_i: the time that a transmission takes, up or down."""
    return bits / rate


def transmission_joules(power: float, seconds: Numbers) -> Numbers:
    """E_up_i = p_i t_up_i."""
    return power * seconds


def outage(
    bandwidth: Numbers,
    power: float,
    gain: Numbers,
    noise: float,
    interference: float,
    bits: Numbers | float,
    slot: float,
) -> Numbers:
    """P_out_i = 1 - exp(-((W_i N0 + I) / (p_i g_i)) (2^(b_i / (W_i S)) - 1)): Rayleigh, a slot of S seconds."""
    with np.errstate(over="ignore"):
        needed = np.expm1(bits / (bandwidth * slot) * LOG2)  # the ratio of signal to noise that carries the rate
        found: Numbers = -np.expm1(-(bandwidth * noise + interference) / (power * gain) * needed)
    return found


def is_lost(rate: Numbers, bits: Numbers | float, slot: float) -> NDArray[np.bool_]:
    """r_i < b_i / S: the fade does not carry the fixed rate of an upload that must fit into a slot."""
    found: NDArray[np.bool_] = rate < bits / slot
    return found


def packet_error(
    margin: float, bandwidth: Numbers, power: float, gain: Numbers, fading: Numbers, noise: float, interference: float
) -> Numbers:
    """P_i = 1 - exp(-m (I + W_i N0) / (p_i g_i a_i)): a waterfall packet error with margin m, in place of outage."""
    found: Numbers = -np.expm1(-margin * (interference + bandwidth * noise) / (power * gain * fading))
    return found
