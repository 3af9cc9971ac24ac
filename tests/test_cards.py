"""docs/algorithms.md says what the code does: its table is measured here, and its cards have every setting."""

import re
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from fedcpsl import config
from fedcpsl.algorithm import optional
from fedcpsl.algorithms import all_algorithms, find_algorithm, semipfl, traits_of
from fedcpsl.errors import InputError
from fedcpsl.federation.terms import terms_from
from fedcpsl.settings import toml_value
from fedcpsl.simulation import initial_state, prepare, simulate
from fedcpsl.trees import leaves

from .conftest import small_federation

NAMES = sorted(all_algorithms())
PAGE = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")
CARDS = {
    title: card for title, card in re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S) if title != "Symbols"
}
COLUMNS = ["algorithm", "U", "own", "down", "up", "device", "server", "gradients", "real devices"]
NAMED = re.compile(r"^`algorithm\.name`: (.+)$", re.M)
SETTING = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", re.M)
BY_VECTORS = [name for name in NAMES if name != "semipfl"]  # whose sizes are those of parts of a model
SENDS_MORE_LATER = {"fedmatch": {"helper_every": 1}, "semifed": {"first_stage": 0}}  # already in the second round
DEPLOYED_WITH = {"feddyn": {"weighted": False}}


def names_of(card):
    return re.findall(r"`([\w-]+)`", NAMED.search(card)[1])


def card_of(name):
    (found,) = [card for card in CARDS.values() if name in names_of(card)]
    return found


def table():
    """The rows of the page's first table, by algorithm."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")
    ]
    assert lines[0] == COLUMNS
    rows = [row for row in lines[2:] if re.fullmatch(r"\[`[\w-]+`\]\(#[\w-]+\)", row[0])]
    return {re.search(r"`(.+)`", row[0])[1]: dict(zip(COLUMNS[1:], row[1:], strict=True)) for row in rows}


TABLE = table()


def network(features=6, classes=3):
    return nn.Sequential(nn.Linear(features, 90), nn.Tanh(), nn.Linear(90, classes))


def setup_of(name, devices=4, **settings):
    """Devices with a recording each that is long enough for FedHAR's runs."""
    whole = small_federation(((4, 26),) * devices, at_server=7 if traits_of(name).server_data else 0)
    federation = whole.__class__(
        whole.x, whole.y, whole.device, whole.role, whole.classes, whole.names, recording=whole.device
    )
    given = config.algorithm_settings(name)(**{"name": name, "eta": 0.01} | settings)
    work = config.Work(rounds=2, active=devices, unit="steps", amount=1)
    run = config.Run(executor="sequential", processes=1, device="cpu", dtype="float64")
    return prepare(federation, network(), given, work, run)


def numbers_in(tree):
    return sum(leaf.numel() for leaf in leaves(tree))


def as_text(numbers, parameters):
    """1+2: so many vectors of the model's size and so many numbers more."""
    vectors, rest = divmod(numbers, parameters)
    return f"{vectors}+{rest}" if rest else str(vectors)


def joined(vectors, more):
    return "+".join([str(vectors)] * bool(vectors) + [more] * bool(more)) or "0"


@cache
def traffic(name):
    """The numbers that a device is sent and sends in a round, a second exchange included: of each all that occur."""
    setup = setup_of(name, **SENDS_MORE_LATER.get(name, {}))
    algorithm, down, up, asked, answered = find_algorithm(name)[0], set(), set(), {0}, {0}
    size = optional(algorithm, "broadcast_size")

    def begin(method, hyper, broadcast, device):
        down.add(int(size(method, broadcast)) if size else numbers_in(broadcast))
        return original_begin(method, hyper, broadcast, device)

    def finish(*given):
        kept, upload = original_finish(*given)
        up.add(numbers_in(upload))
        return kept, upload

    def probe_upload(method, hyper, broadcast, samples):
        answer = original_probe(method, hyper, broadcast, samples)
        asked.add(numbers_in(broadcast))
        answered.add(numbers_in(answer))
        return answer

    with pytest.MonkeyPatch.context() as patch:
        original_begin, original_finish = algorithm.begin, algorithm.finish
        patch.setattr(algorithm, "begin", begin)
        patch.setattr(algorithm, "finish", finish)
        if original_probe := optional(algorithm, "probe_upload"):
            patch.setattr(algorithm, "probe_upload", probe_upload)
        list(simulate(setup))
    if setup.terms.method.sends_nothing:
        return {0}, {0}
    return {n + max(asked) for n in down}, {n + max(answered) for n in up}


def parameters_of(setup):
    return len(setup.terms.method.network.initial)


@pytest.mark.parametrize("name", BY_VECTORS)
def test_what_is_sent_is_as_the_table_says(name):
    parameters = parameters_of(setup_of(name))
    down, up = traffic(name)
    said = as_text(max(down), parameters)
    if len(down) > 1:
        said = f"{min(down) // parameters} to {said}"
    assert (TABLE[name]["down"], TABLE[name]["up"]) == (said, as_text(*up, parameters))


@pytest.mark.parametrize("name", BY_VECTORS)
def test_what_is_kept_is_as_the_table_says(name):
    """In vectors of the model's size; U stands for something of each unlabelled sample, N for one of each device."""
    few, many = (initial_state(setup_of(name, devices)) for devices in (4, 7))
    traits, parameters = few.setup.terms.method.traits, parameters_of(few.setup)
    of_samples = bool(traits.per_sample) or (traits.unlabelled and optional(find_algorithm(name)[0], "relabel"))
    one = few.setup.terms.first_device(few.server)
    kept = sum(numbers_in(getattr(one, field)) for field in one._fields if field not in traits.per_sample)
    assert TABLE[name]["device"] == joined(kept // parameters, "U" * bool(of_samples))

    at_server = [numbers_in(state.server) // parameters for state in (few, many)]
    each = (at_server[1] - at_server[0]) // 3
    fixed = at_server[0] - 4 * each
    said = joined(fixed, "N" if each == 1 else f"{each}N" * bool(each))
    assert TABLE[name]["server"] == ("0" if traits.alone else said)


def test_what_semipfl_sends_and_keeps():
    """(E, D) both ways, then K; a device keeps E and K, one model; the server a hypernetwork and a K of each device."""
    row, setup = TABLE["semipfl"], setup_of("semipfl", hyper_width=2)
    parts, server = semipfl.parts_of(setup.terms.method), setup.terms.first_server()
    assert (row["down"], row["up"], row["device"], row["server"]) == ("(E, D), K", "(E, D)", "1", "phi, N K")
    assert traffic("semipfl") == ({parts.size}, {parts.size})
    reply = semipfl.reply_each(setup.terms.method, server, torch.tensor([0]))
    assert numbers_in(reply) == parts.classifier_size
    assert numbers_in(setup.terms.first_device(server)) == parameters_of(setup)
    assert server.classifiers.shape == (4, parts.classifier_size)


@pytest.mark.parametrize("name", NAMES)
def test_traits_are_as_the_table_says(name):
    traits, row = traits_of(name), TABLE[name]
    assert row["U"] == ("yes" if traits.unlabelled else "-")
    assert row["own"] == ("yes" if traits.personal else "-")
    assert row["gradients"] == str(traits.gradients_per_step)


def can_be_deployed(name, **settings):
    setup = setup_of(name)
    given = config.algorithm_settings(name)(**{"name": name, "eta": 0.01} | settings)
    try:
        terms_from(given, setup.terms.method.network, config.Work(active=4), 4)
    except InputError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_deployability_is_as_the_table_says(name):
    said = TABLE[name]["real devices"]
    assert can_be_deployed(name) == (said == "yes")
    if said not in ("yes", "no"):
        (given,) = DEPLOYED_WITH[name].items()
        assert said == f"`{given[0]} = {toml_value(given[1])}`"
        assert can_be_deployed(name, **DEPLOYED_WITH[name])


def test_every_algorithm_has_a_row_and_a_card_and_nothing_else_has():
    assert sorted(TABLE) == NAMES
    assert sorted(name for card in CARDS.values() for name in names_of(card)) == NAMES


@pytest.mark.parametrize("title", CARDS)
def test_a_card_has_all_its_parts(title):
    """The problem, what is sent and kept, when to use it, what we chose."""
    for part in ("**Problem.**", "**Sent.**", "**Kept.**", "**Use it", "**Not", "**Our choices.**"):
        assert part in CARDS[title], part


def default_of(field):
    return field.default_factory() if field.default is MISSING else field.default


@pytest.mark.parametrize("file", {file.__name__.rpartition(".")[2]: file for file, _ in all_algorithms().values()})
def test_the_settings_of_a_file_are_in_one_of_its_cards(file):
    (settings,) = {of.Settings for of, _ in all_algorithms().values() if of.__name__.endswith(f".{file}")}
    names = [name for name, (of, _) in all_algorithms().items() if of.__name__.endswith(f".{file}")]
    expected = [
        (field.name, toml_value(default_of(field)), field.metadata["help"])
        for field in fields(settings)
        if field.name != "name"
    ]
    found = [SETTING.findall(card) for card in {card_of(name) for name in names}]
    assert [each for each in found if each] == [expected]
