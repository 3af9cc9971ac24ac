"""Personalized semi-supervised federated learning: FedCPSL and its family.

Names are imported when they are first used, so that `import fedcpsl` and the command line answer at once.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "Federation": "fedcpsl.data.federation",
    "from_function": "fedcpsl.data.ondemand",
    "load_federation": "fedcpsl.data.sources",
    "Data": "fedcpsl.config",
    "Algorithm": "fedcpsl.config",
    "Work": "fedcpsl.config",
    "Run": "fedcpsl.config",
    "Edge": "fedcpsl.config",
    "Config": "fedcpsl.config",
    "Costs": "fedcpsl.problem",
    "mlp": "fedcpsl.models",
    "cnn": "fedcpsl.models",
    "cnn1d": "fedcpsl.models",
    "resnet8": "fedcpsl.models",
    "logistic": "fedcpsl.models",
    "prepare": "fedcpsl.step_size",
    "simulate": "fedcpsl.simulation",
    "simulate_together": "fedcpsl.simulation",
    "evaluate": "fedcpsl.evaluation",
    "objectives": "fedcpsl.theory",
    "gap": "fedcpsl.theory",
    "InputError": "fedcpsl.errors",
    "RunError": "fedcpsl.errors",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedcpsl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
