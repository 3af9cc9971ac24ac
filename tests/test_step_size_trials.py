"""A step size searched by real devices: trials with labels held back, resumed after a kill, and what they send."""

import json
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcpsl.config import Data
from fedcpsl.deployment import serve
from fedcpsl.deployment.device_process import DeviceConfig, Handler, predictor
from fedcpsl.deployment.job import job_terms, read_job, trial_of
from fedcpsl.deployment.search import check_found, read_search, with_step_size_found
from fedcpsl.deployment.serve import check_job, run_job
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import (
    COMMON_FIELDS,
    END,
    HELLO,
    MAX_LOSS,
    PROTOCOL,
    TRAIN,
    Attempt,
    Instruction,
    Message,
    pack,
    read_reply,
    unpack,
)
from fedcpsl.federation.privacy import Protection
from fedcpsl.federation.server import held_back_loss
from fedcpsl.federation.server_store import DeviceRecord, ServerState
from fedcpsl.step_size import CANDIDATES, STEPS

JOB = """
[federation]
shape = [6]
classes = ["0", "1", "2"]
min_devices = 2

[model]
name = "mlp"
hidden = [4]

[algorithm]
name = "fedcpsl2"
eta = "search"

[work]
rounds = 4
active = 2
unit = "steps"
amount = 5
"""


class KilledError(Exception):
    """The server is killed here."""


class Devices:
    """A transport to devices of this process, whose messages travel as bytes with the job; it keeps their replies."""

    def __init__(self, handlers, killed_at=()):
        self.handlers, self.job, self.replies, self.exchanges = handlers, "", [], 0
        self.killed_at = set(killed_at)

    def use_job(self, text):
        self.job = text

    def present(self):
        return list(self.handlers)

    def send(self, messages, deadline):  # noqa: ARG002
        self.exchanges += 1
        if self.exchanges in self.killed_at:
            raise KilledError
        for name, message in messages.items():
            content = self.handlers[name].handle(pack(message, self.job))
            reply = unpack(content, "it").message
            self.replies.append((name, read_job(self.job, "it"), reply))
            yield name, reply


def owner(folder, name, scale=1.0, **chosen):
    rng = np.random.default_rng(len(name))
    y = rng.integers(0, 3, 60)
    x = scale * (rng.normal(size=(60, 6)) + 2 * np.eye(3, 6)[y])
    hidden = rng.random(60) < 0.5
    np.savez(folder / f"{name}.npz", x=x, y=np.where(hidden, -1, y), test=~hidden & (rng.random(60) < 0.2))
    data = Data(dataset="own", file=str(folder / f"{name}.npz"), partition="iid", devices=1, labelled=1.0)
    return DeviceConfig(name, data, folder / name, **chosen)


def devices(folder, killed_at=(), names=("ann", "bobby"), **chosen):
    return Devices({name: Handler(owner(folder, name, **chosen)) for name in names}, killed_at)


def run(transport, folder, text=JOB):
    said, states = [], []
    run_job(transport, read_job(text, "job.toml"), folder, states.append, said.append)
    return said, states


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searched")
    transport = devices(folder, share_accuracy=True)
    return folder, transport, *run(transport, folder)


def test_the_job_runs_with_the_step_size_found(searched):
    folder, transport, said, states = searched
    found = read_search(folder)
    assert found["eta"] in CANDIDATES
    assert found["rounds"] == min(4, STEPS // 10)
    assert all(0 < loss < 10 for loss in found["losses"].values())
    assert said[-1].startswith(f"step size {found['eta']:g}, found by trials of 4 rounds each in ")
    assert [line.partition(":")[0] for line in said[:-1]] == [f"step size {eta}" for eta in found["losses"]]
    assert read_job(transport.job, "it").config.algorithm.eta == found["eta"]
    assert states[-1].over
    assert states[-1].round == 4
    status = json.loads((folder / "status.json").read_text())
    assert (status["over"], status["trying"], status["step_size_search"]["eta"]) == (True, None, found["eta"])


def test_nothing_of_a_trial_stays(searched):
    folder, *_ = searched
    assert not (folder / "trials").exists()
    for name in ("ann", "bobby"):
        (kept,) = (folder / name).iterdir()  # the job's own run
        assert not read_job((kept / "job.toml").read_text(), "it").trial
        assert predictor(folder / name).folder == kept


def test_a_device_tells_its_loss_after_a_trial_and_at_no_other_time(searched):
    _, transport, *_ = searched
    for _, job, reply in transport.replies:
        kind, said = reply.header["kind"], set(reply.header) - set(COMMON_FIELDS)
        accuracy = set() if job.trial else {"accuracy"}
        expected = {HELLO: {"labelled", "unlabelled"}, TRAIN: {"steps"} | accuracy, END: accuracy}[kind]
        assert said == expected | ({"loss", "judged"} if job.trial and kind == END else set())
    sizes = {
        job.trial: reply.header["labelled"] for name, job, reply in transport.replies if "labelled" in reply.header
    }
    judged = next(reply.header["judged"] for name, _, reply in transport.replies if "judged" in reply.header)
    last = [reply.header for name, job, reply in transport.replies if name == "bobby" and "labelled" in reply.header]
    assert last[0]["labelled"] < last[-1]["labelled"]  # some are held back in trials
    assert sizes[True] < sizes[False]
    assert judged >= 1


def test_a_server_that_is_killed_goes_on_with_its_search(searched, tmp_path):
    folder, *_ = searched
    transport = devices(tmp_path, killed_at=[4, 9, 15, 22])
    kills = 0
    for _ in range(5):
        try:
            run(transport, tmp_path)
        except KilledError:
            kills += 1
    assert kills == 4
    before, after = read_search(folder), read_search(tmp_path)
    assert (after["eta"], after["losses"]) == (before["eta"], before["losses"])  # bit for bit
    again, _ = run(transport, tmp_path)
    assert again == []  # and never searches twice


def test_step_sizes_that_are_too_large_diverge_and_end_the_search(tmp_path):
    said, states = run(devices(tmp_path, scale=100.0), tmp_path, JOB.replace('"fedcpsl2"', '"fedcpsl2-prior"'))
    found = read_search(tmp_path)
    assert None in found["losses"].values() or max(found["losses"].values()) > 2 * min(found["losses"].values())
    assert len(found["losses"]) < len(CANDIDATES)
    assert states[-1].over
    failed = [name for name, loss in found["losses"].items() if loss is None]
    assert all(f"step size {name}: diverges" in said for name in failed)


def test_where_no_device_can_hold_back_a_label_the_step_size_is_that_of_the_simulator(tmp_path):
    transport = devices(tmp_path)
    for name in transport.handlers:
        x = np.load(tmp_path / f"{name}.npz")["x"]
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.where(np.arange(60) == 3, 1, -1))
    said, states = run(transport, tmp_path)
    assert said == ["step size 0.05, not searched: no device has two labels and lets them judge"]
    assert read_search(tmp_path)["eta"] == 0.05
    assert states[-1].over
    assert not (tmp_path / "trials").exists()


def test_a_loss_that_is_no_number_is_a_divergence_and_no_missing_label(tmp_path, monkeypatch):
    def no_numbers(participant, state, x):  # noqa: ARG001
        return torch.full((len(x), 3), float("nan"))

    monkeypatch.setattr("fedcpsl.federation.device._log_predictions", no_numbers)
    transport = devices(tmp_path)
    with pytest.raises(InputError, match=r"no step size of .* converges on this data; give one"):
        run(transport, tmp_path)
    assert read_search(tmp_path)["losses"] == {"0.003": None}
    assert {reply.header["loss"] for _, _, reply in transport.replies if "loss" in reply.header} == {MAX_LOSS}


def test_noise_or_the_owner_keep_a_device_from_judging(tmp_path):
    noised = devices(tmp_path, names=("ann",), protection=Protection(1.0, 0.1)).handlers
    handlers = noised | devices(tmp_path, names=("bobby", "carol")).handlers
    handlers |= devices(tmp_path, names=("dora-lee",), trials=False).handlers
    transport = Devices(handlers)
    run(transport, tmp_path)
    judges = {name for name, _, reply in transport.replies if "loss" in reply.header}
    assert judges == {"bobby", "carol"}
    trained = {name for name, job, reply in transport.replies if job.trial and reply.header["kind"] == TRAIN}
    assert trained == {"ann", "bobby", "carol"}
    joined = {name for name, job, reply in transport.replies if not job.trial and reply.header["kind"] == HELLO}
    assert joined == set(handlers)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ('eta = "search"', ""),
            'a server has no samples to choose a step size with; give a number .* or eta = "search"',
        ),
        (("min_devices = 2", "min_devices = 2\nclip = 1.0\nnoise = 0.5"), "devices would send losses without noise"),
        (("min_devices = 2", "min_devices = 2\ntrial = true"), "trial: leave it out"),
        (("min_devices = 2", "min_devices = 2\ntrial = 1"), "job.toml: .federation. trial = 1: leave it out"),
        (('"search"', '"serach"'), 'job.toml: algorithm.eta = "serach"'),
    ],
)
def test_a_search_must_be_asked_for_and_can_be_refused(tmp_path, change, words):
    text = JOB.replace(*change)
    with pytest.raises(InputError, match=words):
        check_job(read_job(text, "job.toml"), tmp_path / "job.toml", text)


def test_a_search_that_has_not_ended_gives_no_step_size(tmp_path):
    with pytest.raises(InputError, match="has not ended"):
        with_step_size_found(read_job(JOB, "job.toml"), tmp_path)


GOOD = {"rounds": 6, "losses": {"0.003": 0.5, "0.01": None}, "eta": 0.3, "seconds": 1.5}
DAMAGED = [
    *("{", "[]", "{}", "3"),
    *(
        json.dumps(GOOD | change)
        for change in (
            {"eta": "0.3"},
            {"eta": -0.3},
            {"eta": float("nan")},
            {"rounds": "6"},
            {"losses": []},
            {"losses": {"0.003": "x"}},
            {"seconds": "x"},
        )
    ),
    json.dumps({"eta": 0.3}),
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_search_is_named(content, tmp_path):
    (tmp_path / "search.json").write_text(json.dumps(GOOD))
    assert read_search(tmp_path) == GOOD
    (tmp_path / "search.json").write_text(content)
    with pytest.raises(RunError, match=r"search\.json: (cannot be read|is damaged).*restore it, or start in another"):
        read_search(tmp_path)


def test_rounds_are_not_continued_with_a_step_size_that_is_not_known(searched, tmp_path):
    folder, *_ = searched
    job = read_job(JOB, "job.toml")
    check_found(job, folder, has_rounds=True)
    check_found(job, tmp_path, has_rounds=False)
    with pytest.raises(RunError, match=r"search\.json: is missing.*it has the step size with which the rounds"):
        check_found(job, tmp_path, has_rounds=True)


def test_another_job_may_end_a_search_but_not_rounds(tmp_path):
    given = tmp_path / "given.toml"

    def kept(text):
        given.write_text(text)
        return serve._keep_job(given, serve._job_to_serve(given, tmp_path / "job.toml"), tmp_path)

    kept(JOB)
    (tmp_path / "search.json").write_text(json.dumps(GOOD | {"eta": None}))
    (tmp_path / "trials").mkdir()
    assert kept(JOB.replace('"search"', "0.1")).config.algorithm.eta == 0.1
    assert not (tmp_path / "search.json").exists()
    assert not (tmp_path / "trials").exists()
    with pytest.raises(InputError, match="is another job than"):
        kept(JOB)


def test_a_device_has_no_model_during_a_search(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "job.toml").write_text(trial_of(read_job(JOB, "job.toml"), 0.03, 2).text)
    with pytest.raises(InputError, match="has no model yet: the server is searching a step size"):
        predictor(tmp_path)


def test_a_device_weighs_no_more_than_its_labels():
    """ann's loss 1 on 4 labels, bob's 3 on 2^50 which count as his 4: (4 + 12) / 8 = 2."""
    roster = (DeviceRecord("ann", 4, 0), DeviceRecord("bob", 4, 0), DeviceRecord("carol", 9, 0))
    state = ServerState("r", "", None, roster, Attempt(1, 0), losses={"ann": (1.0, 4), "bob": (3.0, 1 << 50)})
    assert held_back_loss(state) == 2.0
    assert held_back_loss(state._replace(losses={})) == float("inf")


TERMS = job_terms(read_job(JOB.replace('"search"', "0.1"), "job.toml"))
odd = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))


@given(odd, odd)
def test_only_a_finite_loss_on_some_labels_is_read(loss, judged):
    instruction = Instruction("r", Attempt(4, 0), END, "", None, 0, 0, None, 0, 0.0)
    header = {"protocol": PROTOCOL, "run": "r", "round": 4, "attempt": 0, "kind": END}
    header |= {name: value for name, value in (("loss", loss), ("judged", judged)) if value is not None}
    valid = type(loss) is float and 0 <= loss <= 1e4 and type(judged) is int and 1 <= judged < 1 << 53
    if valid or (loss is None and judged is None):
        assert read_reply(Message(header, {}), "ann", instruction, TERMS).loss == loss
    else:
        with pytest.raises(RunError, match="has an invalid loss"):
            read_reply(Message(header, {}), "ann", instruction, TERMS)


def test_a_trial_is_the_same_job_with_another_step_size():
    trial = trial_of(read_job(JOB, "job.toml"), 0.03, 2)
    assert (trial.config.algorithm.eta, trial.rules.rounds, trial.trial, trial.rules.attempts) == (0.03, 2, True, 2)
    assert trial.config.work.amount == 5


def test_real_processes_search_a_step_size_through_a_kill(tmp_path):
    pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'fedcpsl[federation]'")
    from .federation_desk import Desk

    desk = Desk(tmp_path, devices=3, rounds=3, active=2)
    job = tmp_path / "job.toml"
    job.write_text(job.read_text().replace('name = "fedcpsl"\neta = 0.05', 'name = "fedcpsl2"\neta = "search"'))
    try:
        desk.serve()
        for name in desk.names:
            desk.join(name)
        desk.wait(lambda status: (status["trying"] or 0) >= 0.01, 240)
        desk.processes["server"].send_signal(signal.SIGKILL)
        desk.processes["server"].wait()
        time.sleep(0.2)
        desk.serve()
        status = desk.wait(lambda status: status["over"], 240)
        assert desk.processes["server"].wait(120) == 0
    finally:
        desk.close()
    found = read_search(tmp_path / "server")
    assert status["step_size_search"]["eta"] == found["eta"] > 0
    log = (tmp_path / "server.log").read_text()
    assert "trial of step size 0.01: round" in log
    assert log.count("step size 0.003: loss") == 1  # that trial was not made again
    assert f"step size {found['eta']:g}, found by trials" in log
    for name in desk.names:
        (folder,) = (path for path in (tmp_path / "devices" / name).iterdir())
        assert read_job((folder / "job.toml").read_text(), "it").config.algorithm.eta == found["eta"]
