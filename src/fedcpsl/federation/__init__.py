"""A federation of devices that hold their own data: states, messages and checks of both sides, over any transport."""

from fedcpsl.federation.device import Participant, predict, respond
from fedcpsl.federation.messages import Lost, Message, Transport
from fedcpsl.federation.server import RoundRules, serve
from fedcpsl.federation.terms import Terms, digest, terms_of

__all__ = [
    "Lost",
    "Message",
    "Participant",
    "RoundRules",
    "Terms",
    "Transport",
    "digest",
    "predict",
    "respond",
    "serve",
    "terms_of",
]
