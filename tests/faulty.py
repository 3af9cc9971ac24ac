"""Small federations over a transport, and disks, that fail as they are told to."""

import json
import os
import stat
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load, save

from fedcpsl import config, storage
from fedcpsl.algorithm import Method, optional
from fedcpsl.algorithms import all_algorithms, traits_of
from fedcpsl.federation import Message, Participant, RoundRules, respond, terms_of
from fedcpsl.federation.device import load_device_state, resolve_pending, restart_epoch
from fedcpsl.federation.local_training import local_data_of
from fedcpsl.problem import Costs
from fedcpsl.simulation import prepare

from .conftest import small_federation, small_model

SEED = 3
OWN = {  # without which an algorithm cannot run on real devices, or some of it would not be at work
    "feddyn": {"weighted": False},
    "fedhar": {"T": 3, "s_max": 0.5, "R_s": 2, "clip_u": 0.05},
    "semifed": {"tau": 0.35, "first_stage": 2},
    "fedmatch": {"tau": 0.35, "helper_every": 2, "lam_s": 3.0, "lam_2": 0.2},
}


def deployable(name):
    """Whether an algorithm says, with its settings here, that it can run on real devices."""
    file, variant = all_algorithms()[name]
    traits, chosen = file.resolve(variant, file.Settings(name=name, **OWN.get(name, {})), Costs())
    why_not = optional(file, "not_deployable")
    return not traits.alone and not (why_not and why_not(Method(None, traits, chosen)))


NAMES = sorted(filter(deployable, all_algorithms()))
WORK = config.Work(rounds=5, active=4, unit="hlu", hlu=[1, 3], batch_labelled=3, batch_unlabelled=4)


def make(name="fedcpsl", *, work=WORK, model=None, dtype="float64", **numbers):
    """The simulator's setup, from which both sides of a federation are made."""
    kind = config.algorithm_settings(name)
    of_family = {"alpha_p": 0.5, "alpha_r": 0.2, "beta": [0.1, 0.9, 0.0, 1.0, 0.5]}
    chosen = {"eta": 0.05} | (of_family if kind is config.Algorithm else OWN.get(name, {})) | numbers
    if traits_of(name).everyone:
        work = replace(work, active="auto")
    run = config.Run(executor="sequential", processes=1, dtype=dtype, seed=SEED, device="cpu")
    return prepare(small_federation(), model or small_model(), kind(name=name, **chosen), work, run)


def participants(setup, folder, **chosen):
    return {
        name: Participant(terms_of(setup, i), local_data_of(setup, i), folder / name, **chosen)
        for i, name in enumerate(setup.terms.names)
    }


def rules(setup, **chosen):
    return RoundRules(
        **{"rounds": setup.terms.rounds, "seed": setup.terms.seed, "deadline": 9.0, "min_devices": 1} | chosen
    )


def over_the_wire(message):
    """The message after a trip as bytes, as any network would carry it."""
    header, tensors = json.dumps(message.header).encode(), save(message.tensors)
    return Message(json.loads(header), load(tensors))


class Killed(BaseException):
    """The process is gone."""


class Disk:
    """Fails at the n-th of the places where writing can stop, once, if it is told to."""

    def __init__(self):
        self.left, self.error, self.places = None, None, 0

    def fail(self, after, error):
        self.left, self.error = after, error

    def place(self):
        self.places += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise self.error


@contextmanager
def failing_disk():
    """Every sync and every replacement of a file is a place to fail at; what was not synced is torn."""
    disk, fsync, rename = Disk(), os.fsync, Path.replace

    def replaced(path, target):
        disk.place()
        return rename(path, target)

    def synced(descriptor):
        try:
            disk.place()
        except BaseException:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            raise

    storage.os.fsync, Path.replace = synced, replaced
    try:
        yield disk
    finally:
        storage.os.fsync, Path.replace = fsync, rename


FULL = OSError(28, os.strerror(28))
KINDS = (
    "lose instruction",
    "lose reply",
    "twice",
    "late instruction",
    "late reply",
    "kill",
    "kill and retry",
    "full disk",
)


class Faulty:
    """A transport that asks `faults` what to do with each message: (kind, place) or None."""

    def __init__(self, devices, disk, faults, present=None):
        self.devices, self.disk, self.faults = devices, disk, faults
        self.present = present or (lambda: list(devices))
        self.late_instructions, self.late_replies, self.refusals = [], [], []

    def send(self, messages, deadline):
        assert deadline > 0
        replies, self.late_replies = self.late_replies, []
        instructions, self.late_instructions = self.late_instructions, []
        for name, message in instructions:
            replies += self.deliver(name, message, None)
        for name, message in messages.items():
            replies += self.deliver(name, over_the_wire(message), self.faults(name, message))
        return replies

    def deliver(self, name, message, fault):
        kind, place = fault or ("", 0)
        if kind == "lose instruction":
            return []
        if kind == "late instruction":
            self.late_instructions.append((name, message))
            return []
        if kind.startswith("kill"):
            self.disk.fail(place, Killed())
        if kind == "full disk":
            self.disk.fail(place, FULL)
        try:
            replies = [self.ask(name, message)]
        except Killed:
            replies = [self.ask(name, message)] if kind.endswith("retry") else []
        self.disk.left = None
        if kind == "twice":
            replies.append(self.ask(name, message))
        if kind == "late reply":
            self.late_replies += [(name, reply) for reply in replies]
            return []
        return [] if kind == "lose reply" else [(name, reply) for reply in replies]

    def ask(self, name, message):
        reply = over_the_wire(respond(self.devices[name], message))
        if "reason" in reply.header:
            self.refusals.append(reply.header["reason"])
        return reply


def settled(device, member, epoch=0):
    """What a device will have kept once it hears what the server counted, or that control variates start again."""
    kept = load_device_state(device.folder, device.terms)
    kept = kept if kept.epoch == epoch else restart_epoch(device.terms, kept, epoch)
    return resolve_pending(device.terms, kept, member.counted, member.factor)


def gap(state, devices):
    """|c - sum_i omega_i c_i| over the roster."""
    total = torch.zeros_like(state.server.c)
    for member in state.roster:
        total += member.samples / state.samples * settled(devices[member.name], member, state.epoch).committed.c
    return (state.server.c - total).abs().max().item()
