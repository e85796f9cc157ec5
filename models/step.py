"""The training step: state, AdamW, and gradients over microbatches, as pure functions on a mesh."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxoffload
from jaxoffload import Policy
from models.config import Config, Train
from models.moe import Balance
from models.sharding import AnyMesh, batch_sharding, on_mesh, param_shardings
from models.transformer import Transformer, training_loss

Aux = tuple[jax.Array, Balance | None]  # the cross-entropy, and what the layers with experts return


class State(NamedTuple):
    """What a training step takes and returns."""

    step: jax.Array  # () int32, steps taken
    params: nnx.State  # float32, or the matrices in `model.param_dtype`
    optimizer: Any  # what `host_optimizer` keeps: `inner`, AdamW's, and `remainders`, what masters have beyond weights


class Program(NamedTuple):
    """What a config computes: functions to jit, and their arguments as ShapeDtypeStructs with shardings."""

    init: Callable[[], State]
    step: Callable[[State, jax.Array], tuple[State, dict[str, jax.Array]]]  # the new state, and `_metrics`
    loss: Callable[[nnx.State, jax.Array], jax.Array]  # the loss that is differentiated, on one microbatch
    evaluate: Callable[[nnx.State, jax.Array], jax.Array]  # the cross-entropy on one or more microbatches
    state: State
    tokens: jax.ShapeDtypeStruct  # (batch_size, seq_len + 1) int32
    microbatch: jax.ShapeDtypeStruct  # (batch_size / grad_accumulation, seq_len + 1) int32


def program(config: Config, mesh: AnyMesh, end: int = 0) -> Program:
    """Return the program of a config on a mesh; allocates nothing. `end`: the token that ends a document."""
    train, border = config.train, end if config.data.document_mask else None

    def make(groups: int = 1) -> Transformer:
        return Transformer(config.model, nnx.Rngs(params=jax.random.key(train.seed)), groups)

    def first_params() -> nnx.State:
        return in_dtype(nnx.state(make(train.virtual_stages)), config.model.param_dtype)

    def init() -> State:
        params = first_params()
        return State(jnp.int32(0), params, optimizer.init(params))

    graph, in_order = nnx.split(nnx.eval_shape(make))
    abstract = jax.eval_shape(first_params)
    abstract = sharded(abstract, param_shardings(abstract, mesh))
    optimizer = optimizer_of(config, shardings_of(abstract))
    step_number = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    moments = sharded(jax.eval_shape(optimizer.first_state, abstract), optimizer.state_shardings(abstract))

    def loss(params: nnx.State, tokens_BxS1: jax.Array) -> tuple[jax.Array, Aux]:
        model = nnx.merge(graph, regrouped(params, in_order))
        return training_loss(model, tokens_BxS1, config.remat, train.chunk, border)

    def step(state: State, tokens_BxS1: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        tokens_AxMxS1 = microbatches(tokens_BxS1, train.grad_accumulation)
        aux, sums = summed_gradients(config, loss)(state.params, tokens_AxMxS1)
        params, moments = optimizer.apply(sums, state.params, state.optimizer)
        count = train.grad_accumulation
        return State(state.step + 1, params, moments), _metrics(mean(aux, count), mean(sums, count))

    def evaluate(params: nnx.State, tokens_BxS1: jax.Array) -> jax.Array:
        cross_entropy = jaxoffload.evaluate(lambda *args: loss(*args)[1][0], **stages_of(config))
        rows = train.batch_size // train.grad_accumulation
        return cross_entropy(params, microbatches(tokens_BxS1, len(tokens_BxS1) // rows))

    def tokens(rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, train.seq_len + 1), jnp.int32, sharding=batch_sharding(mesh))

    return Program(
        on_mesh(mesh, init),
        on_mesh(mesh, step),
        on_mesh(mesh, lambda params, tokens: loss(params, tokens)[0]),
        on_mesh(mesh, evaluate),
        State(step_number, abstract, moments),  # type: ignore[arg-type]
        tokens(train.batch_size),
        tokens(train.batch_size // train.grad_accumulation),
    )


def summed_gradients(
    config: Config, loss: Callable[[nnx.State, jax.Array], tuple[jax.Array, Aux]]
) -> Callable[[nnx.State, jax.Array], tuple[Aux, nnx.State]]:
    """Return (params, microbatches) -> the sums of `Aux` and gradients over microbatches, in `train.sum_dtype` or in a
    wider dtype that they have.

    On pipeline stages, interleaved, or one microbatch after another, as the config says; the bits are the same where
    XLA rounds alike.
    """
    dtype = jnp.dtype(config.train.sum_dtype)

    def interleaved(params: nnx.State, tokens_AxMxS1: jax.Array) -> tuple[Aux, nnx.State]:
        how = {"reduction": "sum", "sum_dtype": dtype, **stages_of(config)}
        (_, aux_A), gradients = jaxoffload.accumulate(loss, has_aux=True, **how)(params, tokens_AxMxS1)
        return total(lambda aux: aux, aux_A, dtype), gradients

    def one_by_one(params: nnx.State, tokens_AxMxS1: jax.Array) -> tuple[Aux, nnx.State]:
        derivative = functools.partial(jax.value_and_grad(loss, has_aux=True), params)
        (_, aux), gradients = total(derivative, tokens_AxMxS1, dtype)
        return aux, gradients

    return interleaved if config.mesh.stage > 1 or may_interleave(config.train) else one_by_one


def may_interleave(train: Train) -> bool:
    """Return whether the step calls `accumulate`, which interleaves microbatches if the policy offloads anything."""
    return train.grad_accumulation > 1 and train.interleave


def stages_of(config: Config) -> dict[str, Any]:
    """Return what `accumulate` is told of pipeline stages."""
    return {"stages": "stage", "virtual_stages": config.train.virtual_stages} if config.mesh.stage > 1 else {}


def _metrics(aux: Aux, gradients: nnx.State) -> dict[str, jax.Array]:
    """Return the metrics of a step, each () float32.

    loss is the cross-entropy. With experts there are also aux_loss and z_loss, without their weights; expert_load, the
    greatest load of an expert over the even load; and dropped, the share of rows dropped.
    """
    loss, balance = aux
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(optax.tree.cast(gradients, jnp.float32))}
    if balance is not None:
        metrics |= {
            "aux_loss": jnp.mean(balance.aux),
            "z_loss": jnp.mean(balance.z),
            "expert_load": balance.load_E.shape[-1] * jnp.max(balance.load_E),
            "dropped": jnp.mean(balance.dropped),
        }
    return metrics


def adamw(train: Train) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov and Hutter, 2019) on clipped gradients, with weight decay on matrices only."""

    def matrices(params: nnx.State) -> Any:
        is_param = lambda leaf: isinstance(leaf, nnx.Param)
        return jax.tree.map(lambda param: param.replace(len(param.axes) > 1), params, is_leaf=is_param)

    return optax.chain(
        optax.clip_by_global_norm(train.clip_norm),
        optax.adamw(learning_rate(train), train.beta1, train.beta2, weight_decay=train.weight_decay, mask=matrices),
    )


def optimizer_of(config: Config, shardings: nnx.State) -> Any:
    """Return `adamw` with its state on the device or, if `train.optimizer_on_host`, the large arrays of it on the host.

    The settings of where and how it is stored change no bit of what it computes, except `train.state_dtype`.
    """
    on_host = config.train.optimizer_on_host is True
    policy = Policy(default="offload" if on_host else "save", min_offload_bytes=config.remat.min_offload_bytes)
    masters, stored = config.model.param_dtype == "bfloat16", config.train.state_dtype
    how: dict[str, Any] = {"shardings": shardings, "masters": masters, "state_dtype": stored}
    inner, count = adamw(config.train), config.train.grad_accumulation
    # Of sums, divided here: block by block, where the means would be a second set of gradients.
    update = lambda sums, state, params: inner.update(mean(sums, count), state, params)
    return jaxoffload.host_optimizer(optax.GradientTransformation(inner.init, update), policy=policy, **how)


def learning_rate(train: Train) -> optax.Schedule:
    """Return the learning rate by steps taken: linear from zero to the peak, then a cosine down to its final fraction.

    The cosine ends at `train.steps`; the last step is taken at `train.steps` - 1, a little above the final value.
    """
    end = train.learning_rate * train.final_learning_rate_fraction
    return optax.warmup_cosine_decay_schedule(0.0, train.learning_rate, train.warmup_steps, train.steps, end)


def microbatches(tokens_BxS1: jax.Array, count: int) -> jax.Array:
    """Return the microbatches of a batch, (count, B / count, S + 1).

    Row i goes to microbatch i mod count, so that each microbatch is sharded as the batch is.
    """
    B, S1 = tokens_BxS1.shape
    return jnp.swapaxes(tokens_BxS1.reshape(B // count, count, S1), 0, 1)


def mean[T](sums: T, count: int) -> T:
    return jax.tree.map(lambda x: x / count, sums) if count > 1 else sums


def total[X, T](f: Callable[[X], T], xs_A: X, dtype: Any) -> T:
    """Return the sum of f over the leading axis of the leaves of `xs_A`, one after another, added in `dtype` or in a
    wider one that f has."""
    count = len(jax.tree.leaves(xs_A)[0])
    first = jax.tree.map(lambda x: x[0], xs_A)
    if count == 1:
        return f(first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, dtype)), jax.eval_shape(f, first))
    sums, _ = jax.lax.scan(lambda sums, x: (jax.tree.map(jnp.add, sums, f(x)), None), zeros, xs_A)
    return sums


def regrouped[T](tree: T, like: T) -> T:
    """Return arrays in the shapes of `like`, which groups layers in another way, in the same order."""
    return jax.tree.map(lambda x, y: x.reshape(y.shape), tree, like)


def in_dtype(params: nnx.State, dtype: str) -> nnx.State:
    """Return float32 parameters with the matrices in a dtype; norms, and routers, which choose, stay as they are."""
    is_param = lambda leaf: isinstance(leaf, nnx.Param)
    rounds = lambda param: len(param.axes) > 1 and "router" not in param.axes
    cast = lambda param: param.replace(param[...].astype(dtype)) if rounds(param) else param
    return jax.tree.map(cast, params, is_leaf=is_param)


def sharded(abstract: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), abstract, shardings)


def shardings_of(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def traceable(config: Config) -> Config:
    """Return the config as this machine can trace it.

    TransformerEngine and GPU kernels cannot be traced without CUDA. XLA's grouped GEMMs and cuDNN's attention, which
    replace them, have the same named residuals; only TransformerEngine's state of random numbers is missing.
    """
    if jax.default_backend() == "gpu":
        return config
    model = config.model
    attention = "cudnn" if model.attention == "te" else model.attention
    grouped = "ragged" if model.grouped in ("te", "mosaic") else model.grouped
    return replace(config, model=replace(model, attention=attention, grouped=grouped))
