"""A federation of devices that hold their own data: what each side keeps, says and refuses, over any transport."""

from fedcpsl.federation.device import Participant, predict, respond
from fedcpsl.federation.messages import Lost, Message, Transport
from fedcpsl.federation.server import Rules, serve
from fedcpsl.federation.terms import Terms, digest, terms_of

__all__ = [
    "Lost",
    "Message",
    "Participant",
    "Rules",
    "Terms",
    "Transport",
    "digest",
    "predict",
    "respond",
    "serve",
    "terms_of",
]
