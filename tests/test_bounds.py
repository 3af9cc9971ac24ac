"""The step-size limits and bounds of Theorems 1 and 2, by hand."""

from math import sqrt

import pytest

from fedcpsl import theory
from fedcpsl.theory import Constants, PersonalConstants, Start


def constants(**values):
    return Constants(L=2, N=4, m=2, eta_g=3, Q_max=5, Q_min=2.5, sigma=4, S=8)._replace(**values)


def personal_constants(**values):
    given = PersonalConstants(L_F=0.5, L_tilde=3, mu=1, L_h=2, Gamma=0.5, weights=(0.25, 0.75), beta=(0.5, 1))
    return given._replace(**values)


def test_eta_v_limit():
    assert theory.eta_v_limit(2) == 0.125


def test_eta_limit():
    # 2/(48*3*4*2), 1/(8*2*5), 3*3*4/(100*2*2*25), 2/(32*3*4*2)/sqrt(1 + 4): the last is the least
    assert theory.eta_limit(constants()) == pytest.approx(1 / 384 / sqrt(5))
    # longer rounds, Q~ = 40: the third, 36/(100*2*2*1600) = 36/640000
    assert theory.eta_limit(constants(Q_max=40)) == pytest.approx(36 / 640000)
    # the first is the least only where (1 + 2N/m) < 9/4, for which m would have to exceed N: 8/(48*3*1*2)
    assert theory.eta_limit(constants(N=1, m=8, Q_max=0.1)) == pytest.approx(1 / 36)


def test_potential():
    # eta eta_g = 0.3, N/m = 2: 1.5 + 24 * 0.09 * 4 * 2 * 0.5 = 1.5 + 8.64
    assert theory.potential(constants(), 0.1, 1.5, 0.5) == pytest.approx(10.14)


def test_noise():
    # 259/64 + 2/4 + 5*0.1*2*2*25/(24*3*4) = 4.046875 + 0.5 + 50/288; before it 12*0.1*3*4*2*16/(2*8) = 28.8
    assert theory.noise(constants(), 0.1) == pytest.approx(28.8 * (4.546875 + 50 / 288))
    assert theory.noise(constants(sigma=0), 0.1) == 0


def test_gap_bound():
    # 4 (7 - 1)/(0.1*3*10) = 8, and four times the noise
    start = Start(objective=5, potential=7, lowest=1)
    assert theory.gap_bound(constants(sigma=0), 0.1, start, 10) == pytest.approx(8)
    assert theory.gap_bound(constants(), 0.1, start, 10) == pytest.approx(8 + 4 * 28.8 * (4.546875 + 50 / 288))


def test_mixing():
    # only the first device mixes: 0.25 * 0.5 * (4*0.5*3*2*0.5 + 5*2)/4 = 0.125 * 16/4
    assert theory.mixing(2, personal_constants()) == pytest.approx(0.5)
    # 11*2/8 + 11*2*2/(2*4) = 2.75 + 5.5
    assert theory.mixing_limit(constants()) == pytest.approx(8.25)


def test_personal_eta_limit():
    # D_0 = 0.5 is under L: Theorem 1's limit stands. With L_h = 400, D_0 = 0.125 (4*0.5*3*400*0.5 + 10)/4 = 37.8125
    assert theory.personal_eta_limit(constants(), personal_constants()) == theory.eta_limit(constants())
    assert theory.mixing(2, personal_constants(L_h=400)) == pytest.approx(37.8125)
    limit = theory.personal_eta_limit(constants(), personal_constants(L_h=400))
    assert limit == pytest.approx(2 / (48 * 3 * 4 * 37.8125))
    nobody_mixes = personal_constants(beta=(1, 1))
    assert theory.mixing(2, nobody_mixes) == 0
    assert theory.personal_eta_limit(constants(), nobody_mixes) == theory.eta_limit(constants())


def test_eta_c_limit():
    # eta = 0.1: 1/(2*5*0.5) = 0.2; 0.1*3*4*4/(2.5*2*0.25) = 3.84; 0.1*3*4/(2.5*2) = 0.24
    assert theory.eta_c_limit(constants(), personal_constants(), 0.1) == pytest.approx(0.2)
    # eta = 0.05 halves the last two; L_F = 4: 1/40, 2.4/(5*16) = 0.03, and with Q~ = 2.5 always, 1/20
    assert theory.eta_c_limit(constants(), personal_constants(), 0.05) == pytest.approx(0.12)
    assert theory.eta_c_limit(constants(Q_max=2.5), personal_constants(L_F=4), 0.05) == pytest.approx(0.03)


def test_personal_gap_bound():
    # eta = 0.1, eta_c = 0.2: N/(eta_c q m) = 4/(0.2*2.5*2) = 4, sigma^2/S = 2
    bound = theory.personal_gap_bound(
        constants(), personal_constants(), 0.1, 0.2, Start(objective=5, potential=7, lowest=1), 10
    )
    # start: 4 (3*4 + 5.5*6)/10; (a): 3*0.2*0.5*(0.1 + 1)*5*2/2; (b): 3*0.09*16*2/(2*0.2*2.5*4)
    assert bound[:3] == pytest.approx((18, 1.65, 2.16))
    # (c): 66*0.09*16*2*2/(0.2*2.5*4) = 190.08 times the factor of `noise`
    assert bound.c == pytest.approx(190.08 * (4.546875 + 50 / 288))
    # (d): 3*9*0.25/(2*0.2*2.5*2) * (0.25*0.25 + 0.75) = 3.375 * 0.8125
    # (e): 3*4*0.25/(0.2*2.5*2) * 0.25*0.5*0.5*(0.5*2 + 3) = 3 * 0.25
    assert bound[4:6] == pytest.approx((2.7421875, 0.75))
    assert bound.total == pytest.approx(sum(bound[:-1]))
