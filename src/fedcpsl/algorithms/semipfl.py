"""SemiPFL: a hypernetwork at the server makes every device an autoencoder, and the server's labels a classifier for it.

The model is cut in two: its last linear layers are the classifier K, all before them the encoder E; a decoder D of
mirrored widths turns what E finds back into inputs. A device learns (E, D) from all its samples, labelled or not, and
keeps E. The server learns from the change how to make better ones (one device's embedding each), trains K on samples
of its own as the device's E sees them, and replies with it; the device goes on with K on its own labels.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod, sqrt
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcpsl import averaging
from fedcpsl.algorithm import Method, Roster, Traits
from fedcpsl.averaging import adam_direction, adam_moments, descend, per_slot
from fedcpsl.engine import Leaves, Network
from fedcpsl.errors import InputError
from fedcpsl.problem import Samples, cross_entropy
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO, real, text, whole

VARIANTS = {"semipfl": Traits(unlabelled=True, personal=True, server_data=True)}
BETAS = (0.9, 0.999)  # of Adam


@dataclass(frozen=True)
class Settings:
    """SemiPFL's own."""

    name: str = text("semipfl", "the algorithm")
    eta: float | str = real(0.001, "step size of a device's Adam", 0, open_ends="[", also=(AUTO,))
    eta_server: float = real(0.001, "step size of the Adam of the hypernetwork and its embeddings", 0, open_ends="[")
    eta_classifier: float = real(0.001, "step size of the Adam of classifiers", 0, open_ends="[")
    clip: float = real(
        50.0, "maximum norm of the gradient of the hypernetwork and its embeddings (clipping)", 0, open_ends="["
    )
    base_epochs: int = whole(5, "passes over the server's samples that train a classifier", 1)
    tune_epochs: int = whole(5, "passes over a device's labelled samples that train the classifier it was sent", 0)
    batch_server: int = whole(32, "samples in a minibatch of a classifier", 1)
    threshold: float = real(
        0.05, "reconstruction error below which the server uses a minibatch; if none is below, it uses all", 0
    )
    classifier_layers: int | str = whole(
        AUTO,
        "linear layers at the model's end that are the classifier; auto: 2, or 1 if it has no more",
        1,
        also=(AUTO,),
    )
    hyper_width: int = whole(100, "width of the hypernetwork's hidden layers", 1)
    hyper_layers: int = whole(10, "hidden layers of the hypernetwork", 1)


class Hyper(NamedTuple):
    """Numbers that only scale."""

    eta: Tensor


class Server(NamedTuple):
    """What the server keeps."""

    phi: Tensor  # [numbers of the hypernetwork]
    embeddings: Tensor  # [devices, size]
    phi_moments: tuple[Tensor, Tensor]  # of Adam
    embedding_moments: tuple[Tensor, Tensor]
    updates: Tensor  # of phi so far
    counted: Tensor  # [devices]: updates of each embedding
    classifiers: Tensor  # [devices, parameters of K]: the last that each was sent


class Broadcast(NamedTuple):
    """Server to one device."""

    model: Tensor  # [..., parameters of (E, D)]


class Device(NamedTuple):
    """What never leaves the device."""

    encoder: Tensor  # [..., parameters of E]
    classifier: Tensor  # [..., parameters of K]


class Local(NamedTuple):
    """One device's working state in a round."""

    models: Leaves  # [..., 1, *shape] each: (E, D)
    moments: tuple[Leaves, Leaves]  # the same: of Adam
    updates: Tensor  # [...]
    costs: Tensor  # [..., 1]


class Upload(NamedTuple):
    """Device to server."""

    delta: Tensor  # [..., parameters of (E, D)]: before the round minus after it


class Reply(NamedTuple):
    """Server to a device that it counted."""

    classifier: Tensor


class Parts(NamedTuple):
    """What a model is cut into."""

    autoencoder: Network  # its outputs are inputs again
    encoder: nn.Module
    classifier: nn.Module
    encoder_size: int
    classifier_size: int

    @property
    def size(self) -> int:
        """Parameters of (E, D)."""
        return self.autoencoder.initial.numel()


decided, commit, predict = averaging.decided, averaging.commit, averaging.predict_own
resolve = averaging.resolve
_parts: WeakKeyDictionary[nn.Module, dict[Hashable, Parts]] = WeakKeyDictionary()


def rules_of(method: Method) -> Settings:
    assert isinstance(method.rules, Settings)
    return method.rules


def alike(method: Method) -> Hashable:
    """Runs may go side by side where their models are cut at the same layer."""
    return method.traits, rules_of(method).classifier_layers


def numbers(_: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> Mapping[str, Any]:  # noqa: ARG001
    return {"eta": settings.eta}


# The model's parts.


def parts_of(method: Method) -> Parts:
    """The parts of the method's network; runs of one network share them."""
    network, layers = method.network, rules_of(method).classifier_layers
    made = _parts.setdefault(network.module, {})
    key = layers, network.how
    if key not in made:
        made[key] = cut(network, layers)
    return made[key]


def cut(network: Network, layers: int | str) -> Parts:
    """E, D and K of a model that is a chain of layers."""
    chain = list(network.module.children()) if isinstance(network.module, nn.Sequential) else []
    at = classifier_start(chain, layers)
    if at == 0 or network.has_dropout:
        raise InputError(
            "algorithm.name = 'semipfl': needs a chain of layers without dropout, with linear ones at its end "
            "(algorithm.classifier_layers) and others with parameters before those; give --model mlp"
        )
    encoder, classifier = (nn.Sequential(*deepcopy(some)) for some in (chain[:at], chain[at:]))
    widths = [layer.out_features for layer in chain[:at] if isinstance(layer, nn.Linear)]
    first, inputs = chain[at], prod(network.input_shape)
    assert isinstance(first, nn.Linear)
    between = widths[:-1] if widths and widths[-1] == first.in_features else widths
    with torch.random.fork_rng(devices=[]):  # what it starts at is of no use, and nobody else's draws may change
        back = decoder([first.in_features, *between[::-1], inputs])
    autoencoder = network.alike(nn.Sequential(*deepcopy(list(encoder)), *back), inputs)
    return Parts(autoencoder, encoder, classifier, *(_size(part) for part in (encoder, classifier)))


def classifier_start(chain: Sequence[nn.Module], layers: int | str) -> int:
    """Where the classifier begins: at one of the last linear layers, with parameters before it; 0 where that fails."""
    linear = [i for i, layer in enumerate(chain) if isinstance(layer, nn.Linear)]
    for count in (2, 1) if layers == AUTO else (int(layers),):
        at = linear[-count] if count <= len(linear) else 0
        if any(p.requires_grad for layer in chain[:at] for p in layer.parameters()):
            return at
    return 0


def decoder(widths: Sequence[int]) -> list[nn.Module]:
    """Linear layers from the first width to the last, with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return layers[:-1]


def _size(part: nn.Module) -> int:
    return sum(p.numel() for p in part.parameters() if p.requires_grad)


def outputs_of(part: nn.Module, parameters: Tensor, x: Tensor) -> Tensor:
    """What a part of one model gives for x, at parameters that are one flat vector."""
    trained = {name: p.shape for name, p in part.named_parameters() if p.requires_grad}
    pieces = parameters.split([shape.numel() for shape in trained.values()])
    named = {name: piece.view(shape) for (name, shape), piece in zip(trained.items(), pieces, strict=True)}
    found: Tensor = functional_call(part, named, (x,))
    return found


# The hypernetwork.


def hypernetwork(widths: Sequence[int], phi: Tensor, embeddings: Tensor) -> Tensor:
    """phi(e) = W_L relu(... relu(W_1 e + b_1)) + b_L: all weights of (E, D), [devices, parameters]."""
    found, shapes = embeddings, list(pairwise(widths))
    pieces = phi.split([size for a, b in shapes for size in (a * b, b)])
    for layer, (a, b) in enumerate(shapes):
        weight, bias = pieces[2 * layer].view(b, a), pieces[2 * layer + 1]
        found = torch.addmm(bias, found if layer == 0 else found.relu(), weight.T)
    return found


def widths_of(method: Method, embedding: int) -> list[int]:
    """Of the hypernetwork's layers: from an embedding to all parameters of (E, D)."""
    settings = rules_of(method)
    return [embedding, *[settings.hyper_width] * settings.hyper_layers, parts_of(method).size]


def init_server(method: Method, devices: int) -> Server:
    """e_i ~ N(0, 1) of size 1 + floor(N/4), and phi as PyTorch makes linear layers; both follow from theta^0."""
    initial, size = method.network.initial, 1 + devices // 4
    seed = torch.Generator().manual_seed(crc32(initial.to("cpu", torch.float32).numpy().tobytes()))
    embeddings = torch.randn(devices, size, generator=seed).to(initial)
    pieces = []
    for a, b in pairwise(widths_of(method, size)):
        pieces += [(2 * torch.rand(count, generator=seed) - 1) / sqrt(a) for count in (a * b, b)]
    phi = torch.cat(pieces).to(initial)
    zeros, none = torch.zeros_like, initial.new_zeros(())
    start = initial[-parts_of(method).classifier_size :].expand(devices, -1).clone()
    moments = (zeros(phi), zeros(phi)), (zeros(embeddings), zeros(embeddings))
    return Server(phi, embeddings, *moments, none, initial.new_zeros(devices), start)


def admit(_: Method, server: Server, _before: Roster, _after: Roster) -> Server:
    """All devices of a simulation have an embedding from the start, also those that join late."""
    return server


def broadcast_each(method: Method, server: Server, devices: Tensor) -> Broadcast:
    """(E, D)_0 = phi(e_i)."""
    e = server.embeddings[devices]
    return Broadcast(hypernetwork(widths_of(method, e.shape[-1]), server.phi, e))


def receive(method: Method, server: Server, devices: Tensor, uploads: Upload, _omega: Tensor, own: Samples) -> Server:
    """(phi, e_i) <- (phi, e_i) - eta_server Adam(clip(grad mean_A <phi(e_i), delta_i>)), and K_i is trained anew."""
    settings = rules_of(method)
    gradients = clipped(settings.clip, *hypernetwork_gradients(method, server, devices, uploads.delta))
    trained = broadcast_each(method, server, devices).model - uploads.delta
    phi, phi_moments = _after_adam(server.phi, server.phi_moments, gradients[0], server.updates + 1, settings)
    changed = [t.clone() for t in (server.embeddings, *server.embedding_moments, server.counted, server.classifiers)]
    embeddings, first, second, counted, classifiers = changed
    counted[devices] += 1
    moments = first[devices], second[devices]
    moved, (m, v) = _after_adam(embeddings[devices], moments, gradients[1], counted[devices][:, None], settings)
    embeddings[devices], first[devices], second[devices] = moved, m, v
    for device, model in zip(devices.tolist(), trained, strict=True):
        classifiers[device] = base_classifier(method, model, own)
    return Server(phi, embeddings, phi_moments, (first, second), server.updates + 1, counted, classifiers)


def hypernetwork_gradients(method: Method, server: Server, devices: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """grad_{phi, e} (1/m) sum_A <phi(e_i), delta_i>: the vector-Jacobian products, [numbers] and [devices, size]."""
    with torch.enable_grad():
        phi, e = server.phi.detach().requires_grad_(), server.embeddings[devices].detach().requires_grad_()
        made = hypernetwork(widths_of(method, e.shape[-1]), phi, e)
        of_phi, of_e = torch.autograd.grad(made, (phi, e), delta / len(devices))
    return of_phi, of_e


def clipped(most: float, *gradients: Tensor) -> list[Tensor]:
    """v min(1, clip / |v|), the norm being over all gradients together."""
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    factor = (most / norm).clamp_max(1)
    return [factor * g for g in gradients]


def _after_adam(
    numbers: Tensor, moments: tuple[Tensor, Tensor], gradient: Tensor, updates: Tensor, settings: Settings
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    m, v = adam_moments(*moments, gradient, BETAS)
    return numbers - settings.eta_server * adam_direction(m, v, updates, BETAS), (m, v)


# Classifiers.


def base_classifier(method: Method, model: Tensor, own: Samples) -> Tensor:
    """K of one device's (E, D), trained from its start on the server's minibatches that (E, D) rebuilds well.

    Those are the minibatches whose reconstruction error is below the threshold; all of them if none is.
    """
    parts, settings = parts_of(method), rules_of(method)
    with torch.no_grad():
        features = outputs_of(parts.encoder, model[: parts.encoder_size], own.x)
        rebuilt = outputs_of(parts.autoencoder.module, model, own.x)
    each = torch.full_like(own.labelled, 1.0)
    batches = list(_minibatches(len(own.target), settings.batch_server))
    errors = torch.stack([reconstruction_error(own.x[b], each[b] / len(each[b]), rebuilt[b][None])[0] for b in batches])
    good = (errors < settings.threshold).tolist()
    used = [b for b, well in zip(batches, good, strict=True) if well] or batches
    start = method.network.initial[-parts.classifier_size :]
    return trained_classifier(method, start, features, own.target, used * settings.base_epochs)


def trained_classifier(
    method: Method, classifier: Tensor, features: Tensor, target: Tensor, batches: Sequence[slice]
) -> Tensor:
    """K <- K - eta_classifier Adam(grad mean_B CE(y, K(E(x)))), one minibatch after another, by a fresh Adam."""
    part, settings = parts_of(method).classifier, rules_of(method)
    first, second = torch.zeros_like(classifier), torch.zeros_like(classifier)
    for done, rows in enumerate(batches, 1):
        with torch.enable_grad():
            k = classifier.detach().requires_grad_()
            log_h = torch.log_softmax(outputs_of(part, k, features[rows]), -1)
            (gradient,) = torch.autograd.grad(cross_entropy(log_h, target[rows]).mean(), k)
        first, second = adam_moments(first, second, gradient, BETAS)
        step = adam_direction(first, second, first.new_tensor(done), BETAS)
        classifier = classifier - settings.eta_classifier * step
    return classifier


def _minibatches(count: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


def reply_each(_: Method, server: Server, devices: Tensor) -> Reply:
    """K_i, just trained."""
    return Reply(server.classifiers[devices])


def use_reply(method: Method, _hyper: Hyper, reply: Reply, device: Device, labelled: Samples) -> Device:
    """K_i, trained on the device's own labels as its encoder sees them; without labels as it was sent."""
    parts, settings = parts_of(method), rules_of(method)
    batches = list(_minibatches(len(labelled.target), settings.batch_server))
    if not batches:
        return device._replace(classifier=reply.classifier.clone())
    with torch.no_grad():
        features = outputs_of(parts.encoder, device.encoder, labelled.x)
    tuned = trained_classifier(method, reply.classifier, features, labelled.target, batches * settings.tune_epochs)
    return device._replace(classifier=tuned)


# A device's round.


def init_device(method: Method, _broadcast: Broadcast) -> Device:
    """E and K of theta^0: a device that has not been active was sent nothing yet."""
    parts, initial = parts_of(method), method.network.initial
    return Device(initial[: parts.encoder_size].clone(), initial[-parts.classifier_size :].clone())


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, _device: Device) -> Local:
    """(E, D) = (E, D)_0, and a fresh Adam."""
    lead, network = hyper.eta.dim(), parts_of(method).autoencoder
    leaves = network.split(broadcast.model.expand(*hyper.eta.shape, -1))
    models = tuple(leaf.unsqueeze(lead).clone() for leaf in leaves)
    first, second = (tuple(map(torch.zeros_like, models)) for _ in range(2))
    return Local(models, (first, second), torch.zeros_like(hyper.eta), hyper.eta.new_zeros(*hyper.eta.shape, 1))


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """(E, D) <- (E, D) - eta Adam(grad mean |D(E(x)) - x|^2), over the minibatches of L_i and U_i together."""
    network, gradient = parts_of(method).autoencoder, tuple(map(torch.zeros_like, local.models))
    cost = partial(reconstruction_error, samples.x, row_shares(samples))
    costs = network.add_gradient(gradient, local.models, *samples.inputs, cost, of_outputs=True)
    updates = local.updates + 1
    pairs = [adam_moments(m, v, g, BETAS) for m, v, g in zip(*local.moments, gradient, strict=True)]
    steps = tuple(adam_direction(m, v, per_slot(updates, m), BETAS) for m, v in pairs)
    descend(local.models, hyper.eta[..., None], steps)
    moments = tuple(m for m, _ in pairs), tuple(v for _, v in pairs)
    return Local(local.models, moments, updates, local.costs + costs)


def row_shares(samples: Samples) -> Tensor:
    """1 / (rows of both kinds) for each row that is a sample, 0 for padding, [..., samples]."""
    there = ((samples.labelled + samples.unlabelled) > 0).to(samples.labelled)
    return there / there.sum(-1, keepdim=True).clamp_min(1)


def reconstruction_error(x: Tensor, weights: Tensor, outputs: Tensor) -> Tensor:
    """mean_x (1/inputs) |D(E(x)) - x|^2, by the weights of rows; outputs are [..., models, samples, inputs]."""
    wanted = x.flatten(weights.dim()).unsqueeze(-3)
    return ((outputs - wanted).square().mean(-1) * weights.unsqueeze(-2)).sum(-1)


def costs(local: Local) -> Tensor:
    """Reconstruction errors, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, local: Local, _steps: Tensor
) -> tuple[Device, Upload]:
    """delta = (E, D)_0 - (E, D)_Q is sent; E is kept, whatever becomes of it, and K stays until the server replies."""
    lead, parts = hyper.eta.dim(), parts_of(method)
    model = parts.autoencoder.join([leaf.select(lead, 0) for leaf in local.models])
    return Device(model[..., : parts.encoder_size], device.classifier), Upload(broadcast.model - model)


def general_model(_method: Method, _server: Server) -> Tensor | None:
    """None: every classifier is made for the encoder of one device."""
    return None


def received_model(_method: Method, _broadcast: Broadcast) -> Tensor | None:
    return None


def own_model(_method: Method, _hyper: Hyper, device: Device, _general: Tensor | None) -> Tensor | None:
    """h(x) = K(E(x)): the device's encoder and classifier as one model."""
    return torch.cat([device.encoder, device.classifier], -1)


def not_deployable(_: Method) -> str:
    return (
        "its server needs labelled samples and replies within the round, for which there are no messages; simulate it"
    )
