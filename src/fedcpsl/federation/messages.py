"""The messages between the server and the devices: instructions and replies, each a header and named tensors.

A message is checked in full when it is received, so that all other code can trust it. A device sends its update and
its step count; where the algorithm has a second exchange in a round, its answer to that; once its numbers of samples;
its accuracy if its owner shares it; after a trial of a step size, its mean loss on labels that it held back, and how
many they were; and the reason where it refuses. Nothing else.
As bytes, a message is one safetensors file, with the header and the job in its metadata.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedcpsl.errors import RunError, printable
from fedcpsl.federation.terms import Terms, digest, shapes_of
from fedcpsl.trees import Tree, named_leaves, rebuilt

PROTOCOL = 2
HELLO, TRAIN, PROBE, END, REFUSAL = "hello", "train", "probe", "end", "refusal"
MAX_REASON_LENGTH = 300
MAX_COUNT = 1 << 53  # of samples
MAX_INDEX = 1 << 31  # of rounds, attempts and devices, which random streams are keyed by
MAX_SEED = 1 << 63
MAX_LOSS = 1e4  # mean of -log h_p(x)_y; it stands for a loss that is not finite
MAX_DRAWN_SAMPLES = 50_000_000  # by one device in one round: their indices are held in memory
UNSET = -1  # an index in a header that stands for none
COMMON_FIELDS: Mapping[str, type] = {"protocol": int, "run": str, "round": int, "attempt": int, "kind": str}
INSTRUCTION_FIELDS: Mapping[str, type] = {
    **COMMON_FIELDS,
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
REPLY_FIELDS: Mapping[str, Mapping[str, type]] = {
    HELLO: {**COMMON_FIELDS, "labelled": int, "unlabelled": int},
    TRAIN: {**COMMON_FIELDS, "steps": int},
    PROBE: COMMON_FIELDS,
    END: COMMON_FIELDS,
    REFUSAL: {**COMMON_FIELDS, "reason": str, "later": bool},
}
DTYPES = ("F32", "F64", "BOOL")  # that a tensor may have
MAX_PREFIX_BYTES = 1 << 20
Read = Callable[[int], bytes]


class Message(NamedTuple):
    """A header and tensors, as a transport carries them."""

    header: dict[str, bool | int | float | str]
    tensors: dict[str, Tensor]


class Lost(NamedTuple):
    """Stands for a reply that a transport will not receive."""

    reason: str
    fault: bool = False  # whether the device broke the protocol


class Transport(Protocol):
    """Carries messages; it identifies devices by their names and authenticates them."""

    def present(self) -> Iterable[str]:
        """Return the devices that can be reached now."""
        ...

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterable[tuple[str, Message | Lost]]:
        """Deliver a message to each device; return the replies within `deadline` seconds, with their senders."""
        ...


class Attempt(NamedTuple):
    """One attempt at one round; later attempts compare greater, and a device gets at most one instruction in each."""

    round: int
    number: int  # 0 for the first attempt at the round

    def __str__(self) -> str:
        return f"round {self.round}" + (f", attempt {self.number + 1}" if self.number else "")


class Instruction(NamedTuple):
    """What the server asks of a device."""

    run: str
    attempt: Attempt
    kind: str
    settings: str  # digest of the terms
    broadcast: Tree  # for training, for a second exchange, or what a device needs to start and to predict
    device: int  # its index in the roster, which its random streams are keyed by; UNSET before it has one
    seed: int
    counted: Attempt | None  # the last attempt in which the server counted this device's update
    steps: int  # maximum number of local steps
    budget: float  # seconds; 0: no limit
    factor: float = 1.0  # by which the server multiplied the update that it counted last
    epoch: int = 0  # incremented when c and every c_i are reset to 0


class Reply(NamedTuple):
    """What a device sends back to the server."""

    run: str
    attempt: Attempt
    kind: str
    steps: int = 0
    upload: Tree | None = None  # or the answer in a second exchange
    labelled: int = 0
    unlabelled: int = 0
    accuracy: float | None = None  # given only where the device's owner shares it
    reason: str = ""
    later: bool = False  # whether a refusal is only temporary
    loss: float | None = None  # after a trial: the mean over the labels that the device held back
    judged: int = 0  # the number of these labels


def instruction_message(instruction: Instruction) -> Message:
    """Return an instruction as a message."""
    counted = instruction.counted or Attempt(UNSET, UNSET)
    header: dict[str, bool | int | float | str] = {
        "protocol": PROTOCOL,
        "run": instruction.run,
        "round": instruction.attempt.round,
        "attempt": instruction.attempt.number,
        "kind": instruction.kind,
        "settings": instruction.settings,
        "device": instruction.device,
        "seed": instruction.seed,
        "counted_round": counted.round,
        "counted_attempt": counted.number,
        "counted_factor": instruction.factor,
        "epoch": instruction.epoch,
        "steps": instruction.steps,
        "budget": instruction.budget,
    }
    return Message(header, sent_tensors(instruction.broadcast))


def reply_message(reply: Reply) -> Message:
    """Return a reply as a message, with only the fields that its kind needs."""
    header: dict[str, Any] = {
        "protocol": PROTOCOL,
        "run": reply.run,
        "round": reply.attempt.round,
        "attempt": reply.attempt.number,
    }
    header |= {name: getattr(reply, name) for name in REPLY_FIELDS[reply.kind] if name not in header}
    if reply.accuracy is not None:
        header["accuracy"] = reply.accuracy
    if reply.loss is not None:
        header |= {"loss": reply.loss, "judged": reply.judged}
    return Message(header, {} if reply.upload is None else sent_tensors(reply.upload))


def sent_tensors(tree: Tree) -> dict[str, Tensor]:
    """Return the tensors of a state that are sent, by field name. Integers are step counts, which the header has."""
    return {name: t for name, t in named_leaves(tree).items() if t.numel() and _travels(t)}


def _travels(t: Tensor) -> bool:
    """Return whether a tensor is sent: numbers, and what is true or false, which privacy leaves as it is."""
    return t.is_floating_point() or t.dtype == torch.bool


def read_tree(tensors: Mapping[str, Tensor], like: Tree, steps: int) -> Tree:
    """Rebuild a state from received tensors and the step count."""
    count = torch.tensor(steps)
    values = [tensors.get(name, t) if _travels(t) else count for name, t in named_leaves(like).items()]
    return rebuilt(like, values)


def read_instruction(message: Message, terms: Terms) -> Instruction:
    """Check a message from the server and return its instruction."""
    who, header = "the server's instruction", dict[str, Any](message.header)
    _check_header(header, INSTRUCTION_FIELDS, who)
    kind, agreed = header["kind"], digest(terms)
    like = _sent_with(terms, kind)
    if like is None:
        raise RunError(f"{who} has an unknown kind, {kind!r}; install the same fedcpsl on both sides")
    if header["settings"] != agreed:
        raise RunError(
            f"the server's settings are not this device's (their digests are {header['settings']} and {agreed}): "
            "the algorithm, its numbers, the batch sizes, the model or the dtype differ; join with the server's"
        )
    _check_numbers(header, who)
    if kind == TRAIN:
        _check_work(header, terms, who)
    if kind == PROBE and header["device"] < 0:
        raise RunError(f"{who} does not say which device this is")
    _check_tensors(message.tensors, sent_tensors(like), who)
    counted = Attempt(header["counted_round"], header["counted_attempt"])
    return Instruction(
        run=header["run"],
        attempt=_attempt(header, who),
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


def _sent_with(terms: Terms, kind: str) -> Tree | None:
    """Return the template of what an instruction of a kind carries; None where there is no such kind."""
    shapes = shapes_of(terms)
    return {TRAIN: shapes.broadcast, PROBE: shapes.probe, HELLO: shapes.greeting, END: shapes.greeting}.get(kind)


def _check_numbers(header: Mapping[str, Any], who: str) -> None:
    """Refuse numbers out of the range that random streams and arrays can take."""
    for name, low, high in (
        ("device", UNSET, MAX_INDEX),
        ("round", 0, MAX_INDEX),
        ("attempt", 0, MAX_INDEX),
        ("seed", 0, MAX_SEED),
        ("epoch", 0, MAX_COUNT),
        ("counted_factor", 0, 1),
    ):
        if not low <= header[name] <= high:
            raise RunError(f"{who} has {name} = {header[name]}: it must be from {low} to {high}")


def _check_work(header: Mapping[str, Any], terms: Terms, who: str) -> None:
    """Refuse training that cannot be done, or that needs more memory than a device may use."""
    steps, budget, device = header["steps"], header["budget"], header["device"]
    if steps < 1 or device < 0 or not 0 <= budget < float("inf"):
        raise RunError(f"{who} asks for {steps} steps in {budget} s of device {device}")
    drawn = steps * (terms.work.batch_labelled + terms.work.batch_unlabelled)
    if drawn > MAX_DRAWN_SAMPLES:
        raise RunError(
            f"{who} asks for {steps} steps, {drawn} samples in one round: the maximum is {MAX_DRAWN_SAMPLES}"
        )


def read_reply(message: Message, name: str, instruction: Instruction, terms: Terms) -> Reply:
    """Check a message from the device `name` and return its reply to an instruction; RunError where it is invalid."""
    who, header = f"the reply of device {name!r}", dict[str, Any](message.header)
    accuracy, loss, judged = (header.pop(name, None) for name in ("accuracy", "loss", "judged"))
    kind = header.get("kind")
    _check_header(header, REPLY_FIELDS.get(kind, COMMON_FIELDS) if isinstance(kind, str) else COMMON_FIELDS, who)
    attempt = _attempt(header, who)
    if header["run"] != instruction.run:
        raise RunError(f"{who} belongs to another run, {_short(header['run'])}")
    if attempt != instruction.attempt:
        raise RunError(f"{who} is for {attempt}, which is over: it came too late")
    if kind == REFUSAL:
        return Reply(instruction.run, attempt, REFUSAL, reason=_short(header["reason"]), later=header["later"])
    if kind != instruction.kind:
        raise RunError(f"{who} has the kind {_short(kind)} where {instruction.kind!r} was asked for")
    if accuracy is not None and not (kind in (TRAIN, END) and isinstance(accuracy, float) and 0 <= accuracy <= 1):
        raise RunError(f"{who} has an invalid accuracy: {_short(accuracy)}")
    if (loss, judged) != (None, None) and not (kind == END and _is_loss(loss, judged)):
        raise RunError(f"{who} has an invalid loss: {_short(loss)} on {_short(judged)} labels")
    if kind == TRAIN and not 1 <= header["steps"] <= instruction.steps:
        raise RunError(f"{who} has {header['steps']} steps where 1 to {instruction.steps} were asked for")
    sizes = header.get("labelled", 0), header.get("unlabelled", 0)
    if kind == HELLO and not (min(sizes) >= 0 < sum(sizes) < MAX_COUNT):
        raise RunError(f"{who} has {sizes[0]} labelled and {sizes[1]} unlabelled samples: it needs some")
    like, steps = {TRAIN: shapes_of(terms).upload, PROBE: shapes_of(terms).answer}.get(kind), header.get("steps", 0)
    _check_tensors(message.tensors, {} if like is None else sent_tensors(like), who)
    upload = None if like is None else read_tree(message.tensors, like, steps)
    return Reply(instruction.run, attempt, kind, steps, upload, *sizes, accuracy, loss=loss, judged=judged or 0)


def _is_loss(loss: Any, judged: Any) -> bool:
    return type(loss) is float and type(judged) is int and 0 <= loss <= MAX_LOSS and 1 <= judged < MAX_COUNT


def is_late(message: Message, instruction: Instruction) -> bool:
    """Return whether a reply belongs to an earlier instruction of the run, which is useless but no fault."""
    round, attempt = message.header.get("round"), message.header.get("attempt")
    if not isinstance(round, int) or not isinstance(attempt, int):
        return False
    trained = message.header.get("kind") == TRAIN and instruction.kind == PROBE  # which comes after it
    before = (round, attempt) < instruction.attempt or (trained and (round, attempt) == instruction.attempt)
    return message.header.get("run") == instruction.run and before


def _check_header(header: Mapping[str, Any], expected: Mapping[str, type], who: str) -> None:
    if header.get("protocol") != PROTOCOL:
        theirs = _short(header.get("protocol"))
        raise RunError(f"{who} speaks protocol {theirs}, this is {PROTOCOL}; install the same fedcpsl on both sides")
    if wrong := sorted(set(header) ^ set(expected)):
        raise RunError(f"{who}: {_short(wrong[0])} {'is missing' if wrong[0] in expected else 'is not expected'}")
    for name, kind in expected.items():
        if type(header[name]) is not kind:
            raise RunError(f"{who}: {name} = {_short(header[name])} where {kind.__name__} is needed")


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], who: str) -> None:
    if wrong := sorted(set(tensors) ^ set(expected)):
        raise RunError(f"{who}: {_short(wrong[0])} {'is missing' if wrong[0] in expected else 'is not expected'}")
    for name, t in tensors.items():
        like = expected[name]
        if t.dtype != like.dtype:
            raise RunError(f"{who}: {name} has dtype {t.dtype} where the model has {like.dtype}")
        if t.shape != like.shape:
            raise RunError(f"{who}: {name} has shape {list(t.shape)} where {list(like.shape)} is needed")
        if not t.isfinite().all():
            raise RunError(f"{who}: {name} has numbers that are not finite")


def _attempt(header: Mapping[str, Any], who: str) -> Attempt:
    attempt = Attempt(header["round"], header["attempt"])
    if min(attempt) < 0:
        raise RunError(f"{who} has round {attempt.round} and attempt {attempt.number}: neither can be negative")
    return attempt


def _short(text: object) -> str:
    return printable(text, MAX_REASON_LENGTH)


class Packet(NamedTuple):
    """A message, and the text of the job that it belongs to (empty in a reply)."""

    message: Message
    job: str = ""


class MessagePrefix(NamedTuple):
    """Everything that comes before the tensors of a message."""

    header: dict[str, Any]
    job: str
    tensor_bytes: int
    raw: bytes


def pack(message: Message, job: str = "") -> bytes:
    """Return a message as bytes."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in message.tensors.items()}
    return save(tensors, {"header": json.dumps(message.header), "job": job})


def unpack(content: bytes, who: str) -> Packet:
    """Return the message in bytes; RunError where they are not one."""
    left = memoryview(content)
    position = 0

    def read(count: int) -> bytes:
        nonlocal position
        piece = bytes(left[position : position + count])
        position += count
        return piece

    prefix = read_prefix(read, who)
    return read_message(prefix, bytes(left[position:]), who)


def read_prefix(read: Read, who: str) -> MessagePrefix:
    """Read only what comes before the tensors; `read(n)` returns the next n bytes."""
    first = read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= MAX_PREFIX_BYTES:
        raise RunError(f"{who}: not a message of fedcpsl")
    text = read(length)
    try:
        listed = json.loads(text)
        metadata = listed.pop("__metadata__")
        header = json.loads(metadata["header"])
        job = metadata["job"]
        sizes = [_size_of(each) for each in listed.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{who}: not a message of fedcpsl") from error
    if not isinstance(header, dict) or not isinstance(job, str):
        raise RunError(f"{who}: not a message of fedcpsl")
    if any(not isinstance(value, bool | int | float | str) for value in header.values()):
        raise RunError(f"{who}: its header has values that are neither numbers nor strings")
    return MessagePrefix(header, job, sum(sizes), first + text)


def read_message(prefix: MessagePrefix, tensors: bytes, who: str) -> Packet:
    """Return the message, from its prefix and the bytes of its tensors."""
    try:
        return Packet(Message(prefix.header, load(prefix.raw + tensors)), prefix.job)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise RunError(f"{who}: its tensors do not match its header ({error})") from error


def _size_of(listed: dict[str, Any]) -> int:
    if listed["dtype"] not in DTYPES:
        raise ValueError("a tensor of another dtype")
    begin, end = listed["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError("a tensor of negative size")
    return int(end - begin)
