"""What the server and the devices say to each other: a few numbers and words, and named tensors.

A message is checked in full where it comes in, so what is behind that can trust it. A device sends its update and its
step count; once its sizes; its accuracy if its owner shares it; and, where it refuses, why. Nothing else.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedcpsl.errors import RunError, printable
from fedcpsl.federation.terms import Terms, digest, shapes_of
from fedcpsl.trees import Tree, named_leaves, rebuilt

PROTOCOL = 2
HELLO, TRAIN, END, REFUSAL = "hello", "train", "end", "refusal"
LONGEST_REASON = 300
LARGEST_COUNT = 1 << 53
LARGEST_INDEX = 1 << 31  # of rounds, attempts and devices, which random streams are keyed by
LARGEST_SEED = 1 << 63
LARGEST_DRAW = 50_000_000  # samples that a device may be asked to draw in a round: their indices are held in memory
NEVER = -1
COMMON: Mapping[str, type] = {"protocol": int, "run": str, "round": int, "attempt": int, "kind": str}
OF_ORDER: Mapping[str, type] = {
    **COMMON,
    "settings": str,
    "device": int,
    "seed": int,
    "counted_round": int,
    "counted_attempt": int,
    "counted_factor": float,
    "epoch": int,
    "steps": int,
    "budget": float,
}
OF_ANSWER: Mapping[str, Mapping[str, type]] = {
    HELLO: {**COMMON, "labelled": int, "unlabelled": int},
    TRAIN: {**COMMON, "steps": int},
    END: COMMON,
    REFUSAL: {**COMMON, "reason": str, "later": bool},
}


class Message(NamedTuple):
    """What a transport carries."""

    header: dict[str, bool | int | float | str]
    tensors: dict[str, Tensor]


class Lost(NamedTuple):
    """What a transport says of an answer that will not come."""

    reason: str
    fault: bool = False  # whether the device did what it must not


class Transport(Protocol):
    """Whatever carries messages; devices go by their names, which it vouches for."""

    def present(self) -> Iterable[str]:
        """The devices that can be reached now."""
        ...

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterable[tuple[str, Message | Lost]]:
        """Deliver a message to each device; what came in within so many seconds, by whom."""
        ...


class Turn(NamedTuple):
    """One attempt at one round: later ones compare greater, and no two orders of a run to a device share one."""

    round: int
    attempt: int

    def __str__(self) -> str:
        return f"round {self.round}" + (f", attempt {self.attempt + 1}" if self.attempt else "")


class Order(NamedTuple):
    """Server to device."""

    run: str
    turn: Turn
    kind: str
    settings: str  # digest of the terms
    broadcast: Tree  # all of it for training, else what a device needs to begin and to predict
    device: int  # its place in the roster, which its random streams are keyed by; NEVER before it has one
    seed: int
    counted: Turn | None  # the last one that the server counted this device's update in
    steps: int  # most to take
    budget: float  # seconds; 0: no limit
    factor: float = 1.0  # by which the server multiplied the update that it counted last
    epoch: int = 0  # rises when the server starts c and every c_i at 0 again


class Answer(NamedTuple):
    """Device to server."""

    run: str
    turn: Turn
    kind: str
    steps: int = 0
    upload: Tree | None = None
    labelled: int = 0
    unlabelled: int = 0
    accuracy: float | None = None  # given only where the device's owner shares it
    reason: str = ""
    later: bool = False  # whether a refusal is for now only


def order_message(order: Order) -> Message:
    """An order as a transport carries it."""
    counted = order.counted or Turn(NEVER, NEVER)
    header: dict[str, bool | int | float | str] = {
        "protocol": PROTOCOL,
        "run": order.run,
        "round": order.turn.round,
        "attempt": order.turn.attempt,
        "kind": order.kind,
        "settings": order.settings,
        "device": order.device,
        "seed": order.seed,
        "counted_round": counted.round,
        "counted_attempt": counted.attempt,
        "counted_factor": order.factor,
        "epoch": order.epoch,
        "steps": order.steps,
        "budget": order.budget,
    }
    return Message(header, sent_tensors(order.broadcast))


def answer_message(answer: Answer) -> Message:
    """An answer as a transport carries it: what its kind needs, and no more."""
    header: dict[str, Any] = {
        "protocol": PROTOCOL,
        "run": answer.run,
        "round": answer.turn.round,
        "attempt": answer.turn.attempt,
    }
    header |= {name: getattr(answer, name) for name in OF_ANSWER[answer.kind] if name not in header}
    if answer.accuracy is not None:
        header["accuracy"] = answer.accuracy
    return Message(header, {} if answer.upload is None else sent_tensors(answer.upload))


def sent_tensors(tree: Tree) -> dict[str, Tensor]:
    """What of a state travels, by the names of its fields; whole numbers count steps, and these the header has."""
    return {name: t for name, t in named_leaves(tree).items() if t.numel() and t.is_floating_point()}


def read_tree(tensors: Mapping[str, Tensor], like: Tree, steps: int) -> Tree:
    """A state from what travelled, and the count of steps."""
    count = torch.tensor(steps)
    values = [tensors.get(name, t) if t.is_floating_point() else count for name, t in named_leaves(like).items()]
    return rebuilt(like, values)


def read_order(message: Message, terms: Terms) -> Order:
    """The order in a message from the server."""
    who, header = "the server's order", dict[str, Any](message.header)
    _check_header(header, OF_ORDER, who)
    kind, agreed = header["kind"], digest(terms)
    if kind not in (HELLO, TRAIN, END):
        raise RunError(f"{who} is of an unknown kind, {kind!r}; install the same fedcpsl on both sides")
    if header["settings"] != agreed:
        raise RunError(
            f"the server's settings are not this device's (their digests are {header['settings']} and {agreed}): "
            "the algorithm, its numbers, the batch sizes, the model or the dtype differ; join with the server's"
        )
    _check_numbers(header, who)
    if kind == TRAIN:
        _check_work(header, terms, who)
    like = shapes_of(terms).broadcast if kind == TRAIN else shapes_of(terms).greeting
    _check_tensors(message.tensors, sent_tensors(like), who)
    counted = Turn(header["counted_round"], header["counted_attempt"])
    return Order(
        run=header["run"],
        turn=_turn(header, who),
        kind=kind,
        settings=agreed,
        broadcast=read_tree(message.tensors, like, header["steps"]),
        device=header["device"],
        seed=header["seed"],
        counted=None if counted.round < 0 else counted,
        steps=header["steps"],
        budget=header["budget"],
        factor=header["counted_factor"],
        epoch=header["epoch"],
    )


def _check_numbers(header: Mapping[str, Any], who: str) -> None:
    """Refuse numbers that no server of ours sends and that random streams or arrays cannot take."""
    for name, low, high in (
        ("device", NEVER, LARGEST_INDEX),
        ("round", 0, LARGEST_INDEX),
        ("attempt", 0, LARGEST_INDEX),
        ("seed", 0, LARGEST_SEED),
        ("epoch", 0, LARGEST_COUNT),
        ("counted_factor", 0, 1),
    ):
        if not low <= header[name] <= high:
            raise RunError(f"{who} has {name} = {header[name]}: it must be from {low} to {high}")


def _check_work(header: Mapping[str, Any], terms: Terms, who: str) -> None:
    """Refuse work that cannot be done, or more than fits into a device's memory."""
    steps, budget, device = header["steps"], header["budget"], header["device"]
    if steps < 1 or device < 0 or not 0 <= budget < float("inf"):
        raise RunError(f"{who} asks for {steps} steps in {budget} s of device {device}")
    drawn = steps * (terms.work.batch_labelled + terms.work.batch_unlabelled)
    if drawn > LARGEST_DRAW:
        raise RunError(f"{who} asks for {steps} steps, {drawn} samples in one round: at most {LARGEST_DRAW} are drawn")


def read_answer(message: Message, name: str, order: Order, terms: Terms) -> Answer:
    """The answer of the device `name` to an order: what was asked for, or a refusal; RunError where it is neither."""
    who, header = f"the answer of device {name!r}", dict[str, Any](message.header)
    accuracy = header.pop("accuracy", None)
    kind = header.get("kind")
    _check_header(header, OF_ANSWER.get(kind, COMMON) if isinstance(kind, str) else COMMON, who)
    turn = _turn(header, who)
    if header["run"] != order.run:
        raise RunError(f"{who} belongs to another run, {_short(header['run'])}")
    if turn != order.turn:
        raise RunError(f"{who} is to {turn}, which is over: it came too late")
    if kind == REFUSAL:
        return Answer(order.run, turn, REFUSAL, reason=_short(header["reason"]), later=header["later"])
    if kind != order.kind:
        raise RunError(f"{who} is of the kind {_short(kind)} where {order.kind!r} was asked for")
    if accuracy is not None and not (kind != HELLO and isinstance(accuracy, float) and 0 <= accuracy <= 1):
        raise RunError(f"{who} has an accuracy that is none: {_short(accuracy)}")
    if kind == TRAIN and not 1 <= header["steps"] <= order.steps:
        raise RunError(f"{who} has {header['steps']} steps where 1 to {order.steps} were asked for")
    sizes = header.get("labelled", 0), header.get("unlabelled", 0)
    if kind == HELLO and not (min(sizes) >= 0 < sum(sizes) < LARGEST_COUNT):
        raise RunError(f"{who} has {sizes[0]} labelled and {sizes[1]} unlabelled samples: it needs some")
    like = shapes_of(terms).upload
    _check_tensors(message.tensors, sent_tensors(like) if kind == TRAIN else {}, who)
    upload = read_tree(message.tensors, like, header["steps"]) if kind == TRAIN else None
    return Answer(order.run, turn, kind, header.get("steps", 0), upload, *sizes, accuracy)


def is_late(message: Message, order: Order) -> bool:
    """Whether an answer is to an earlier order of the run: honest, and of no use."""
    round, attempt = message.header.get("round"), message.header.get("attempt")
    if not isinstance(round, int) or not isinstance(attempt, int):
        return False
    return message.header.get("run") == order.run and (round, attempt) < order.turn


def _check_header(header: Mapping[str, Any], expected: Mapping[str, type], who: str) -> None:
    if header.get("protocol") != PROTOCOL:
        theirs = _short(header.get("protocol"))
        raise RunError(f"{who} speaks protocol {theirs}, this is {PROTOCOL}; install the same fedcpsl on both sides")
    if wrong := sorted(set(header) ^ set(expected)):
        raise RunError(f"{who}: {_short(wrong[0])} {'is missing' if wrong[0] in expected else 'has no place there'}")
    for name, kind in expected.items():
        if type(header[name]) is not kind:
            raise RunError(f"{who}: {name} = {_short(header[name])} where {kind.__name__} is needed")


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], who: str) -> None:
    if wrong := sorted(set(tensors) ^ set(expected)):
        raise RunError(f"{who}: {_short(wrong[0])} {'is missing' if wrong[0] in expected else 'has no place there'}")
    for name, t in tensors.items():
        like = expected[name]
        if t.dtype != like.dtype:
            raise RunError(f"{who}: {name} is of {t.dtype} where the model is of {like.dtype}")
        if t.shape != like.shape:
            raise RunError(f"{who}: {name} has shape {list(t.shape)} where {list(like.shape)} is needed")
        if not t.isfinite().all():
            raise RunError(f"{who}: {name} has numbers that are not finite")


def _turn(header: Mapping[str, Any], who: str) -> Turn:
    turn = Turn(header["round"], header["attempt"])
    if min(turn) < 0:
        raise RunError(f"{who} has round {turn.round} and attempt {turn.attempt}: neither can be negative")
    return turn


def _short(text: object) -> str:
    return printable(text, LONGEST_REASON)
