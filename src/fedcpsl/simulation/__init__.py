"""The rounds, the executors, and where device states live."""

from fedcpsl.simulation.rounds import simulate, simulate_together
from fedcpsl.simulation.setup import Setup, prepare
from fedcpsl.simulation.state import State, initial_state

__all__ = ["Setup", "State", "initial_state", "prepare", "simulate", "simulate_together"]
