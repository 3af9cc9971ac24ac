"""A device that misbehaves, as a process: python -m tests.odd_device nan|shapes|full join ..."""

import os
import sys

from fedcpsl import storage
from fedcpsl.cli import run_command
from fedcpsl.deployment import device_process

TRUE_RESPOND, TRUE_FSYNC = device_process.respond, os.fsync


def with_nan(*asked):
    message = TRUE_RESPOND(*asked)
    for delta in message.tensors.values():
        delta[0] = float("nan")
    return message


def of_another_model(*asked):
    message = TRUE_RESPOND(*asked)
    return message._replace(tensors={name: delta[:-1] for name, delta in message.tensors.items()})


def on_a_filling_disk(descriptor):
    """There is room for the greeting and one round."""
    written.append("safetensors" in os.readlink(f"/proc/self/fd/{descriptor}"))
    if written[-1] and sum(written) > 2:
        raise OSError(28, os.strerror(28))
    TRUE_FSYNC(descriptor)


written: list[bool] = []

if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "full":
        storage.os.fsync = on_a_filling_disk
    else:
        device_process.respond = {"nan": with_nan, "shapes": of_another_model}[kind]
    sys.exit(run_command(arguments))
