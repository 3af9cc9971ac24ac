"""The workload in FedJAX, with its own FedAvg and its jit backend.

    python benchmarks/peers/fed_jax.py --data cifar.npz [--rounds 60] [--device cuda] [--precision tf32] [--preload]

FedJAX hands batches to the device step by step; with --preload they lie there beforehand, in an order that stays.
FedJAX 0.0.17 calls jax.tree_map, which JAX no longer has; it is put back.
"""

import os
from importlib.metadata import version

import absent
import common
import numpy as np


class OnDevice:
    """As much of a fedjax.ClientDataset as its FedAvg asks for."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        import jax

        self.size = len(y)
        firsts = range(0, len(y), common.BATCH)
        self.batches = [jax.device_put({"x": x[i : i + common.BATCH], "y": y[i : i + common.BATCH]}) for i in firsts]

    def __len__(self) -> int:
        return self.size

    def shuffle_repeat_batch(self, _: object) -> list[dict[str, object]]:
        return self.batches


def cnn():
    """pfl-research's CNN, and its initialisation, as a FedJAX model."""
    import fedjax
    import haiku as hk
    import jax

    glorot = hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")

    def outputs(batch, training: bool = True):
        def dropped(rate, h):
            return hk.dropout(hk.next_rng_key(), rate, h) if training else h

        h = jax.nn.relu(hk.Conv2D(32, 3, padding="VALID", w_init=glorot)(batch["x"]))
        h = jax.nn.relu(hk.Conv2D(64, 3, padding="VALID", w_init=glorot)(h))
        h = dropped(0.25, hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), "VALID")(h))
        h = dropped(0.5, jax.nn.relu(hk.Linear(128, w_init=glorot)(hk.Flatten()(h))))
        return hk.Linear(10, w_init=glorot)(h)

    return fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(outputs),
        sample_batch={"x": np.zeros((1, 32, 32, 3), np.float32), "y": np.zeros(1, np.int32)},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
        eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
        train_kwargs={"training": True},
        eval_kwargs={"training": False},
    )


def main() -> None:
    options = common.options(__doc__)
    options.add_argument("--preload", action="store_true")
    chosen = options.parse_args()
    os.environ["JAX_PLATFORMS"] = chosen.device
    if chosen.threads and chosen.device == "cpu":  # JAX takes as many as it may run on
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: chosen.threads])
    import jax

    if chosen.precision == "ieee":  # else JAX lets a GPU use TF32
        jax.config.update("jax_default_matmul_precision", "highest")
    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree_util.tree_map
    absent.allow("requests", "tabulate", "scipy")
    import fedjax

    fedjax.set_for_each_client_backend("jit")
    data = common.load(chosen.data, chosen.seed).channels_last()
    data = data._replace(y=data.y.astype(np.int32), y_test=data.y_test.astype(np.int32))
    size, rng = common.IMAGES_OF_CLIENT, np.random.default_rng(chosen.seed)
    make = OnDevice if chosen.preload else lambda x, y: fedjax.ClientDataset({"x": x, "y": y})
    clients = [make(data.x[i : i + size], data.y[i : i + size]) for i in range(0, len(data.y), size)]
    tests = fedjax.ClientDataset({"x": data.x_test, "y": data.y_test})
    tests = [jax.device_put(b) for b in tests.padded_batch(batch_size=common.EVALUATION_BATCH[chosen.device])]
    model = cnn()
    fed_avg = fedjax.algorithms.fed_avg.federated_averaging(
        grad_fn=fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(common.ETA),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(common.BATCH, num_epochs=1, seed=chosen.seed),
    )
    state = fed_avg.init(model.init(jax.random.PRNGKey(chosen.seed)))
    assert sum(leaf.size for leaf in jax.tree_util.tree_leaves(state.params)) == common.PARAMETERS
    clock = common.Clock(chosen.rounds, chosen.warmup, lambda: jax.block_until_ready(state.params))
    key = jax.random.PRNGKey(chosen.seed + 1)
    for done in range(1, chosen.rounds + 1):
        key, *keys = jax.random.split(key, 1 + common.ACTIVE)
        active = common.cohort(rng, len(clients))  # its numbers in the round are the names that FedJAX wants
        state, _ = fed_avg.apply(state, [(i, clients[c], keys[i]) for i, c in enumerate(active)])
        if common.evaluates(done):
            fedjax.evaluate_model(model, state.params, tests)
        clock.round_done()
    accuracy = fedjax.evaluate_model(model, state.params, tests)["accuracy"]
    common.report(chosen, clock, accuracy, len(clients), fedjax=version("fedjax"), jax=jax.__version__)


if __name__ == "__main__":
    main()
