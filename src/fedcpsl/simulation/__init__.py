"""The rounds, the executors, and where device states live."""

from fedcpsl.simulation.rounds import State, initial_state, simulate, simulate_together
from fedcpsl.simulation.setup import Setup, prepare

__all__ = ["Setup", "State", "initial_state", "prepare", "simulate", "simulate_together"]
