"""A device's side: it carries out instructions one at a time, and writes each reply to disk before it sends it.

An upload changes some of a device's state (FedCPSL's c_i) only once the server has counted it. The device learns that
from a later instruction, together with the factor by which the server multiplied the upload. So there are two slots:
`committed`, and beside it `pending`, the last upload; it was computed with the broadcast that was `received` last. Both
are in one file that is replaced as a whole, once for each instruction: a kill at any moment leaves the state before
the instruction or after it. No other account of the machine can read it.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.federation.local_training import (
    Clock,
    LocalData,
    adapted_model,
    answer,
    initial_pseudo_labels,
    log_predictions,
    train,
)
from fedcpsl.federation.messages import (
    HELLO,
    MAX_LOSS,
    PROBE,
    REFUSAL,
    TRAIN,
    Attempt,
    Instruction,
    Lost,
    Message,
    Reply,
    read_instruction,
    read_tree,
    reply_message,
    sent_tensors,
)
from fedcpsl.federation.privacy import Protection, check_protection, protect, scale_update
from fedcpsl.federation.terms import Shapes, Terms, shapes_of
from fedcpsl.storage import load_tensors, make_folder, save_tensors
from fedcpsl.trees import Tree, map_tensors, named_leaves, rebuilt

LOG = logging.getLogger("fedcpsl")
DEVICE_FILE = "device.safetensors"


class PendingUpload(NamedTuple):
    """The last upload, while the device does not know yet whether the server counted it."""

    reply: Reply  # as it was sent, to be sent again if the instruction is repeated
    c: Tensor | None = None  # in files of version 0.1, which had only FedCPSL's family: c_i in case it was counted


class DeviceState(NamedTuple):
    """Everything that a device stores between instructions."""

    run: str
    labelled: int  # the numbers of samples that it joined with
    unlabelled: int
    committed: Tree  # the algorithm's device state, with counted uploads only
    counted: Attempt | None  # of the last upload in `committed`
    pending: PendingUpload | None
    last: Attempt | None  # in which the device trained
    received: Tree  # the last broadcast, or the part of it that came with an instruction other than training
    nu: Tensor  # [unlabelled, classes]; no rows where unlabelled samples are not used
    active_rounds: int
    epoch: int = 0  # of the control variates
    adapted: Tensor | None = None  # the model received, adapted to the samples: it predicts also without them
    answer: Reply | None = None  # the last one in a second exchange, to be sent again if the instruction is repeated


class Participant(NamedTuple):
    """A device in one run, and its owner's choices."""

    terms: Terms
    local_data: LocalData
    folder: Path  # for its state in this run
    budget: float = 0.0  # seconds of training in a round; 0: no limit
    protection: Protection = Protection()
    share_accuracy: bool = False
    trial: bool = False  # of a step size: the tests of `local_data` are labels held back, and the loss on them is sent


def respond(participant: Participant, message: Message, clock: Clock = time.monotonic) -> Message:
    """Return the reply to a message from the server; on an error, a refusal with the reason."""
    try:
        return reply_message(carry_out(participant, read_instruction(message, participant.terms), clock))
    except RunError as error:
        LOG.warning("%s", printable(error))
        reason = str(error).replace(str(participant.folder), "its folder")
        return refusal(message, reason)


def carry_out(participant: Participant, instruction: Instruction, clock: Clock = time.monotonic) -> Reply:
    """Carry out an instruction and return the reply, the same one if it is repeated; RunError where it is refused."""
    check_protection(participant.protection)
    with lock_device_folder(participant.folder):
        state = load_device_state(participant.folder, participant.terms)
        if state is not None:
            _check_state(participant, state, instruction)
            if instruction.epoch != state.epoch:
                state = restart_epoch(participant.terms, state, instruction.epoch)
        if instruction.kind == HELLO:
            return _greet(participant, state, instruction)
        if instruction.kind == PROBE:
            return _answer(participant, state, instruction)
        if state is None:
            state = _initial_state(participant, instruction)
        if state.last is not None and instruction.attempt <= state.last:
            return _repeat_reply(state, instruction)
        state = resolve_pending(participant.terms, state, instruction.counted, instruction.factor)
        adapted = adapted_model(participant.terms, instruction.broadcast, participant.local_data)
        state = state._replace(received=instruction.broadcast, adapted=adapted)
        if instruction.kind == TRAIN:
            state, reply = _train(participant, state._replace(last=instruction.attempt), instruction, clock)
        else:
            reply = Reply(
                instruction.run, instruction.attempt, instruction.kind, accuracy=_accuracy(participant, state)
            )
            if participant.trial:
                reply = _judged(participant, state, reply)
        save_device_state(participant.folder, state)
        return reply


def predict(participant: Participant, x: Tensor) -> Tensor:
    """Return class probabilities by the device's personal model, also while it is being trained."""
    state = load_device_state(participant.folder, participant.terms)
    if state is None:
        raise InputError(f"{participant.folder}: no model yet; join a federation first")
    return _log_predictions(participant, state, x).exp()


def _train(
    participant: Participant, state: DeviceState, instruction: Instruction, clock: Clock
) -> tuple[DeviceState, Reply]:
    """Train for a round; return the new state, with the upload pending, and the reply."""
    terms, local_data = participant.terms, participant.local_data
    before = map_tensors(lambda t: t.to(terms.where), state.committed)
    budget = min(filter(None, (participant.budget, instruction.budget)), default=0.0)
    warming = state.active_rounds < terms.method.traits.warm_up
    nu = state.nu.to(terms.where)
    device, nu, upload, steps = train(terms, local_data, before, nu, instruction, budget, clock, warming=warming)
    sent = map_tensors(Tensor.cpu, protect(upload, participant.protection))
    state = state._replace(
        committed=map_tensors(Tensor.cpu, device),
        nu=nu.cpu(),
        active_rounds=state.active_rounds + 1,
    )
    reply = Reply(
        instruction.run,
        instruction.attempt,
        TRAIN,
        steps=steps,
        upload=sent,
        accuracy=_accuracy(participant, state),
    )
    return state._replace(pending=PendingUpload(reply)), reply


def _answer(participant: Participant, state: DeviceState | None, instruction: Instruction) -> Reply:
    """Answer in the second exchange of a round, which changes nothing else; the same again if it is repeated."""
    if state is None:
        raise RunError("this device has no state of this run yet: it was not asked to join")
    before = state.answer
    if before is not None and before.attempt == instruction.attempt:
        return before
    newest = max(filter(None, (state.last, before and before.attempt)), default=None)
    if newest is not None and instruction.attempt < newest:
        raise RunError(f"the instruction is for {instruction.attempt}, but this device was already asked in {newest}")
    terms = participant.terms
    found = answer(terms, participant.local_data, state.nu.to(terms.where), instruction)
    sent = map_tensors(Tensor.cpu, protect(found, participant.protection))
    reply = Reply(instruction.run, instruction.attempt, PROBE, upload=sent)
    save_device_state(participant.folder, state._replace(answer=reply))
    return reply


def _check_state(participant: Participant, state: DeviceState, instruction: Instruction) -> None:
    """Refuse to mix runs, or to continue with other samples than those that the server knows of."""
    local_data = participant.local_data
    if state.run != instruction.run:
        raise RunError(
            f"{participant.folder}: holds the state of run {state.run}, the server's run is {instruction.run}; "
            "give each run a folder of its own"
        )
    if (state.labelled, state.unlabelled) != (local_data.labelled, local_data.unlabelled):
        raise RunError(
            f"this device joined with {state.labelled} labelled and {state.unlabelled} unlabelled samples and now has "
            f"{local_data.labelled} and {local_data.unlabelled}; give it the same ones, or join under another name"
        )


def _greet(participant: Participant, state: DeviceState | None, instruction: Instruction) -> Reply:
    """Reply with the numbers of samples; the device's own model starts at the one in the instruction."""
    if state is None:
        state = _initial_state(participant, instruction)
    elif state.counted is not None:
        raise RunError(
            "the server has forgotten that it counted this device: its folder was restored from an older copy"
        )
    save_device_state(participant.folder, state)
    return Reply(instruction.run, instruction.attempt, HELLO, labelled=state.labelled, unlabelled=state.unlabelled)


def _initial_state(participant: Participant, instruction: Instruction) -> DeviceState:
    """Return the state of a device before its first round."""
    if instruction.counted is not None:
        raise RunError(
            f"this device's state is missing, but the server has counted it (last in {instruction.counted}): its "
            "control variate cannot be computed again; restore its folder, or join under another name"
        )
    terms, local_data = participant.terms, participant.local_data
    method = terms.method
    if method.traits.per_sample:
        method = method._replace(most_unlabelled=max(method.most_unlabelled, local_data.unlabelled))
    device = terms.algorithm.init_device(method, instruction.broadcast)
    with_labels = optional(terms.algorithm, "with_labels")
    if with_labels:
        there = map_tensors(lambda t: t.to(terms.where), device)
        device = map_tensors(Tensor.cpu, with_labels(terms.method, terms.hyper, there, local_data.labels.sum(0)))
    return DeviceState(
        run=instruction.run,
        labelled=local_data.labelled,
        unlabelled=local_data.unlabelled,
        committed=device,
        counted=None,
        pending=None,
        last=None,
        received=instruction.broadcast,
        nu=initial_pseudo_labels(terms, local_data).cpu(),
        active_rounds=0,
        epoch=instruction.epoch,
        adapted=adapted_model(terms, instruction.broadcast, local_data),
    )


def _repeat_reply(state: DeviceState, instruction: Instruction) -> Reply:
    """Return the same reply to a repeated instruction; RunError where it is older than the last one."""
    if state.pending and instruction.kind == TRAIN and instruction.attempt == state.last:
        return state.pending.reply
    raise RunError(f"the instruction is for {instruction.attempt}, but this device has already trained in {state.last}")


def _accuracy(participant: Participant, state: DeviceState) -> float | None:
    """Return the personal model's accuracy on the device's test samples; None where its owner does not share it."""
    y = participant.local_data.y_test
    if not participant.share_accuracy or not len(y):
        return None
    predicted = _log_predictions(participant, state, participant.local_data.x_test).argmax(-1)
    return float((predicted == y).double().mean())


def _judged(participant: Participant, state: DeviceState, reply: Reply) -> Reply:
    """Return a reply with the mean of -log h_p(x)_y over the labels held back; the maximum where it is no number."""
    local_data = participant.local_data
    if not len(local_data.y_test):
        return reply
    log_h = _log_predictions(participant, state, local_data.x_test)
    loss = float(-log_h.gather(1, local_data.y_test[:, None]).double().mean())
    return reply._replace(loss=min(loss, MAX_LOSS) if isfinite(loss) else MAX_LOSS, judged=len(local_data.y_test))


def _log_predictions(participant: Participant, state: DeviceState, x: Tensor) -> Tensor:
    where = participant.terms.where
    received, device = (map_tensors(lambda t: t.to(where), tree) for tree in (state.received, state.committed))
    return log_predictions(participant.terms, received, device, x, state.adapted)


def refusal(message: Message, reason: str, *, later: bool = False) -> Message:
    """Return a refusal of a message, which may be malformed; `later`: only a temporary one."""
    header = message.header
    run, round, number = header.get("run", ""), header.get("round", 0), header.get("attempt", 0)
    attempt = Attempt(round if isinstance(round, int) else 0, number if isinstance(number, int) else 0)
    return reply_message(Reply(run if isinstance(run, str) else "", attempt, REFUSAL, reason=reason, later=later))


def resolve_pending(terms: Terms, state: DeviceState, counted: Attempt | None, factor: float = 1.0) -> DeviceState:
    """Return the state given which upload was counted last, and with which factor: the pending or an earlier one."""
    if counted == state.counted:
        return state._replace(pending=None)
    if state.pending and counted == state.pending.reply.attempt:
        committed = _with_counted(terms, state, state.pending, factor)
        return state._replace(committed=committed, counted=counted, pending=None)
    raise RunError(
        f"the server counted this device last in {counted or 'no round'}, but its state is of "
        f"{state.counted or 'no round'}: one of the two was restored from an older copy; restore the newest, or join "
        "under another name"
    )


def _with_counted(terms: Terms, state: DeviceState, pending: PendingUpload, factor: float) -> Tree:
    """Return the algorithm's device state after its upload was counted with `factor`."""
    if pending.c is not None:
        return state.committed._replace(c=pending.c)
    upload = scale_update(pending.reply.upload, factor)
    broadcast, device, sent = (
        map_tensors(lambda t: t.to(terms.where), tree) for tree in (state.received, state.committed, upload)
    )
    return map_tensors(Tensor.cpu, terms.algorithm.commit(terms.method, terms.hyper, broadcast, device, sent))


def restart_epoch(terms: Terms, state: DeviceState, epoch: int) -> DeviceState:
    """Return the state after the server reset the control variates: nothing is counted yet; models stay."""
    if epoch < state.epoch:
        raise RunError(
            f"the server's control variates are of epoch {epoch}, this device's of {state.epoch}: the server "
            "was restored from an older copy; restore the newest, or go back with `fedcpsl serve --back-to`"
        )
    again = optional(terms.algorithm, "started_again")
    committed = again(state.committed) if again else state.committed
    return state._replace(committed=committed, counted=None, pending=None, last=None, answer=None, epoch=epoch)


@contextmanager
def lock_device_folder(folder: Path) -> Iterator[None]:
    """Make the folder and lock it: a second process waits. A crash releases the lock."""
    make_folder(folder, private=True)
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}; give a folder that is writable") from error
    with file:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def save_device_state(folder: Path, state: DeviceState) -> None:
    """Write the state, and return once it is on disk."""
    pending, tensors = state.pending, {"nu": state.nu}
    tensors |= named_leaves(state.committed, "committed") | named_leaves(state.received, "received")
    tensors |= {} if state.adapted is None else {"adapted": state.adapted}
    names = ("run", "labelled", "unlabelled", "active_rounds", "epoch")
    header: dict[str, Any] = {name: getattr(state, name) for name in names}
    header |= {"counted": state.counted, "last": state.last}
    if pending and pending.reply.upload is not None:
        tensors |= {f"pending.{name}": t for name, t in sent_tensors(pending.reply.upload).items()}
        tensors |= {} if pending.c is None else {"pending.c": pending.c}
        header["pending"] = [*pending.reply.attempt, pending.reply.steps, pending.reply.accuracy]
    if state.answer is not None:
        tensors |= {f"answer.{name}": t for name, t in sent_tensors(state.answer.upload).items()}
        header["answer"] = state.answer.attempt
    save_tensors(folder / DEVICE_FILE, tensors, header, private=True)


def load_device_state(folder: Path, terms: Terms) -> DeviceState | None:
    """Return what `save_device_state` wrote; None where there is no file yet."""
    if not (folder / DEVICE_FILE).exists():
        return None
    tensors, numbers = load_tensors(folder / DEVICE_FILE)
    header = dict[str, Any](numbers)
    shapes = shapes_of(terms)
    try:
        return DeviceState(
            run=header["run"],
            labelled=header["labelled"],
            unlabelled=header["unlabelled"],
            committed=rebuilt(shapes.device, [tensors[name] for name in named_leaves(shapes.device, "committed")]),
            counted=_attempt(header["counted"]),
            pending=_pending(header, tensors, shapes),
            last=_attempt(header["last"]),
            received=_received(tensors, shapes),
            nu=tensors["nu"],
            active_rounds=header["active_rounds"],
            epoch=header.get("epoch", 0),
            adapted=tensors.get("adapted"),
            answer=_last_answer(header, tensors, shapes),
        )
    except KeyError as error:
        raise RunError(
            f"{folder / DEVICE_FILE}: not the state of a device of this version: {error} is missing"
        ) from error


def _received(tensors: dict[str, Tensor], shapes: Shapes) -> Tree:
    """Return the last broadcast; versions before 0.2 stored its parts elsewhere, and had only FedCPSL's family."""
    if "theta" in tensors:
        tensors = {"received.theta": tensors["theta"], "received.c": tensors.get("pending.c_server", torch.zeros(0))}
    return rebuilt(shapes.broadcast, [tensors[name] for name in named_leaves(shapes.broadcast, "received")])


def _pending(header: dict[str, Any], tensors: dict[str, Tensor], shapes: Shapes) -> PendingUpload | None:
    if "pending" not in header:
        return None
    round, number, steps, accuracy = header["pending"]
    sent = {name: tensors[f"pending.{name}"] for name in sent_tensors(shapes.upload)}
    upload = read_tree(sent, shapes.upload, steps)
    reply = Reply(header["run"], Attempt(round, number), TRAIN, steps=steps, upload=upload, accuracy=accuracy)
    return PendingUpload(reply, tensors.get("pending.c"))


def _last_answer(header: dict[str, Any], tensors: dict[str, Tensor], shapes: Shapes) -> Reply | None:
    if "answer" not in header:
        return None
    sent = {name: tensors[f"answer.{name}"] for name in sent_tensors(shapes.answer)}
    return Reply(header["run"], Attempt(*header["answer"]), PROBE, upload=read_tree(sent, shapes.answer, 0))


def _attempt(written: list[int] | None) -> Attempt | None:
    return None if written is None else Attempt(*written)


class LoopbackTransport(NamedTuple):
    """A transport within one process that loses nothing, for trials and tests."""

    participants: dict[str, Participant]

    def present(self) -> list[str]:
        return list(self.participants)

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterator[tuple[str, Message | Lost]]:  # noqa: ARG002
        for name, message in messages.items():
            yield name, respond(self.participants[name], message)
