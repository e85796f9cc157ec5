"""Policy: which named residuals the backward pass finds saved, offloaded or recomputed."""

import dataclasses
import fnmatch
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import name_p

from ._errors import Problem, UserError
from ._jax import is_traceable, nbytes
from ._megatron import MODULES
from ._names import read_names
from ._refusals import refuse_remat3, refuse_wrong_offload
from ._text import nearest, one_of, short
from ._tracing import tracing

Decision = Literal["save", "offload", "recompute"]

_DECISIONS = get_args(Decision)
_CHOICES = {
    "default": _DECISIONS,
    "dots": _DECISIONS,
    "other_layers": ("save", "recompute"),
    "on_host_full": ("error", "save"),
}
_UNITS = {"": 1, "B": 1} | {f"{p}{b}": s**k for k, p in enumerate("KMGT", 1) for b, s in (("iB", 1024), ("B", 1000))}


class PolicyError(UserError, ValueError):
    """A policy is wrong; `problems` has a key and a message for each field or pattern.

    Example:
      >>> from jaxoffload import Policy, PolicyError
      >>> try:
      ...     Policy(default="ofload")
      ... except PolicyError as error:
      ...     print(error)
      default: 'ofload' is not allowed; use 'save', 'offload' or 'recompute'; the nearest is 'offload'
    """


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which residuals the backward pass finds saved (on the device), offloaded (in pinned host memory) or recomputed.

    Args:
      residuals: pattern -> decision. Patterns match as in `fnmatch`, component by component: `*` does not cross `/`,
        `**` is any number of components. A pattern without a slash matches the last component of a name, in every
        scope; one without a dot matches all leaves of a composite, and what is behind the last dot of a name. The last
        matching pattern wins.
      offload_modules: names of Megatron-LM's `--offload-modules`, such as "moe_act". Each stands for patterns marked
        offload, which the table shows; they come before `residuals`, so `residuals` wins.
      default: the decision on tagged values that no pattern matches.
      dots: the decision on untagged outputs of matmuls without batch dimensions.
      min_offload_bytes: a smaller value marked offload is saved. In bytes, or a string such as "1MiB"; compared with
        the bytes per layer on all devices (in `shard_map`: on one) of the value, or of the composite it is a leaf of.
      resident_layers: how many of the last layers of a `scan` keep their residuals on the device.
      offload_layers: how many of the first layers of a `scan` offload: "all", a count, or a fraction in [0, 1], rounded
        down.
      other_layers: what the layers between do with values marked offload: "save" or "recompute".
      on_host_full: if a `scan`, `chain` or `checkpoint` needs more than the pinned host pool, or all in the loss of
        `accumulate`: "error", or "save" (offload fewer layers). `check` and `residuals` judge what a step needs in all.

    Raises:
      PolicyError: it lists each wrong field with its value, what is allowed and the nearest allowed value.

    A policy is frozen and hashable. It is also callable as JAX's own `policy=`, for `jax.checkpoint`, `nn.remat` and
    `nnx.remat`. In a loss under `offload` they then do what ours do. Otherwise JAX asks about one equation at a time,
    so on that route: `dots` keeps a matmul under a tag marked recompute; a value with two kept names is stored twice;
    composites are judged leaf by leaf; a pattern that matches nothing is not an error (call `check`); there are no
    layers; the output of `exp` and the like is recomputed; `residuals` does not show what is recomputed, and `verify`
    does not check it.

    `Policy(**dataclasses.asdict(policy))` is equal to `policy`, also through YAML and JSON. `offload` reads such a dict
    as the policy, where a framework gives it to `jax.checkpoint`.

    Example:
      >>> from jaxoffload import Policy
      >>> policy = Policy({"fc1": "offload", "attn/*": "save"}, min_offload_bytes="1MiB")
      >>> [policy.decision(name) for name in ("mlp/fc1", "attn/q", "mlp/norm")]
      ['offload', 'save', 'recompute']
    """

    residuals: Mapping[str, Decision] | tuple[tuple[str, Decision], ...] = ()
    offload_modules: Sequence[str] = ()
    default: Decision = "recompute"
    dots: Decision = "recompute"
    min_offload_bytes: int | str = 2**20
    resident_layers: int = 1
    offload_layers: int | float | Literal["all"] = "all"
    other_layers: Literal["save", "recompute"] = "save"
    on_host_full: Literal["error", "save"] = "error"

    def __post_init__(self) -> None:
        for field in ("residuals", "offload_modules"):
            if isinstance(given := getattr(self, field), Iterator):  # can be read only once
                object.__setattr__(self, field, tuple(given))
        problems = _residual_problems(self.residuals) + _module_problems(self.offload_modules)
        for field, allowed in _CHOICES.items():
            problems += _choice(field, getattr(self, field), allowed)
        problems += _number_problems(self)
        if problems:
            raise PolicyError(problems)
        object.__setattr__(self, "residuals", _last_of_each(_pairs(self.residuals)))
        object.__setattr__(self, "offload_modules", tuple(self.offload_modules))
        object.__setattr__(self, "min_offload_bytes", size_in_bytes(self.min_offload_bytes))
        if isinstance(layers := self.offload_layers, float):  # 1.0 == 1 in Python, but means all layers
            object.__setattr__(self, "offload_layers", {0.0: 0, 1.0: "all"}.get(layers, layers))

    @classmethod
    def from_maxtext(cls, on_device: Sequence[str] = (), to_offload: Sequence[str] = (), **fields: Any) -> "Policy":
        """Return what MaxText's `remat_policy: custom` asks for: these names saved, those offloaded, others recomputed.

        Args:
          on_device: its `tensors_on_device`, the names that its config marks `device`.
          to_offload: its `tensors_to_offload`, the names that its config marks `offload`.
          fields: other fields of the policy. As in MaxText values of any size are offloaded; unlike there, the last
            layer of a `scan` keeps its residuals on the device (`resident_layers`).

        Raises:
          PolicyError: one of them is not a list, a name is in both, or another field is wrong.

        Example:
          >>> from jaxoffload import Policy
          >>> policy = Policy.from_maxtext(["decoder_layer_input"], ["context", "mlpwi_0", "mlpwi_1"])
          >>> [policy.decision(name) for name in ("decoder_layer_input", "mlpwi_0", "mlpwo")]
          ['save', 'offload', 'recompute']
        """
        lists = {"on_device": on_device, "to_offload": to_offload}
        problems = [
            _problem(field, f"{short(names)} is not a list of names, such as ['context']")
            for field, names in lists.items()
            if not isinstance(names, (tuple, list))
        ]
        both = [] if problems else [name for name in to_offload if name in on_device]
        problems += [_problem("to_offload", f"{name!r} is in on_device too; keep one of them") for name in both]
        if problems:
            raise PolicyError(problems)
        residuals = [(name, "save") for name in on_device] + [(name, "offload") for name in to_offload]
        return cls(**{"residuals": tuple(residuals), "min_offload_bytes": 0, **fields})

    @functools.cached_property
    def rules(self) -> tuple[tuple[str, Decision], ...]:
        """(pattern, decision) pairs: those of `offload_modules`, then those of `residuals`."""
        translated = [(pattern, "offload") for module in self.offload_modules for pattern in MODULES[module]]
        return _last_of_each([*translated, *_pairs(self.residuals)])

    def match(self, *names: str) -> tuple[str, Decision] | None:
        """Return the last pattern that matches one of `names`, and its decision; None if none matches."""
        hits = (rule for rule in reversed(self.rules) if any(matches(rule[0], n) for n in names))
        return next(hits, None)

    def decision(self, name: str) -> Decision:
        """Return the decision on a value that has this name only."""
        return (self.match(name) or (None, self.default))[1]

    def reason(self, pattern: str) -> str:
        """Return what asked for a pattern of `rules`, as the table shows it: its modules, or the pattern itself."""
        modules = self._modules(pattern)
        return f"{', '.join(modules)} (offload_modules)" if modules else pattern

    def source(self, pattern: str) -> str:
        """Return where a pattern of `rules` was written, for error messages."""
        modules = self._modules(pattern)
        return f"offload_modules{modules} -> {pattern!r}" if modules else f"residuals[{pattern!r}]"

    def _modules(self, pattern: str) -> list[str]:
        """Return the `offload_modules` that a pattern stands for; none if `residuals` has the pattern too."""
        if pattern in dict(_pairs(self.residuals)):
            return []
        return [module for module in self.offload_modules if pattern in MODULES[module]]

    def offloaded_layers(self, layers: int) -> int:
        """Return how many of a scan's first layers offload."""
        wanted = self.offload_layers
        if wanted == "all":
            wanted = layers
        elif isinstance(wanted, float):
            wanted = math.floor(Fraction(str(wanted)) * layers)  # in floats 0.58 of 50 would be 28
        return max(0, min(int(wanted), layers - self.resident_layers))

    def unmatched(
        self, names: Iterable[str], one: str = "tagged value", many: str = "names tagged under the policy"
    ) -> list[Problem]:
        """Return a problem for each pattern that matches none of `names`, in whose text one is called so, and many."""
        names = sorted(set(names))
        unmatched = [p for p, _ in self.rules if not any(matches(p, n) for n in names)]
        return [_unmatched(self.source(p), p, names, one, many * (n == 0)) for n, p in enumerate(unmatched)]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """Return JAX's verdict on the outputs of one equation, as its `policy=`."""
        refuse_remat3()
        if prim is name_p:
            name = read_names(params["name"])[0]
            if name.keep or not jnp.issubdtype(avals[0].dtype, jnp.inexact):
                return VERDICT["save"]
            decision = self.decision(name.text)
        elif jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *avals, **params):
            decision = self.dots
        else:
            return VERDICT["recompute"]
        if decision == "offload":
            if tracing().reference or (prim is name_p and nbytes(avals[0]) < int(self.min_offload_bytes)):
                return VERDICT["save"]
            refuse_wrong_offload()
        return VERDICT[decision]


def check_arguments(caller: str, policy: Any, strict: Any = True) -> None:
    """Raise TypeError if `caller` cannot take these arguments."""
    if not isinstance(policy, Policy):
        raise TypeError(f"{caller}: policy must be a jaxoffload.Policy, got {policy!r}")
    check_switches(caller, strict=strict)


def check_functions(caller: str, **functions: Any) -> None:
    """Raise TypeError if one of these arguments of `caller` is not a function."""
    for name, value in functions.items():
        if not callable(value):
            raise TypeError(f"{caller}: {name} must be a function, got {short(value)}")


def check_call(caller: str, f: Any, args: Sequence[Any]) -> None:
    """Raise TypeError if `caller` cannot trace this call: `f` is no function, or an argument holds what is no array."""
    check_functions(caller, f=f)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tuple(args)):
        if not is_traceable(leaf):
            raise TypeError(
                f"{caller}: args{jax.tree_util.keystr(path)} is {short(leaf)}, of type {type(leaf).__name__}; "
                "arguments are pytrees of arrays: bind what is none with functools.partial. In Equinox, "
                "eqx.partition(module, eqx.is_inexact_array) divides a module"
            )


def check_switches(caller: str, **switches: Any) -> None:
    """Raise TypeError if one of these arguments of `caller` is not a bool: any other value is true or false, too."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{caller}: {name} must be True or False, got {value!r}")


def _verdicts() -> dict[str, Any]:
    """Return what a JAX policy returns for each decision. A public policy is asked, for the types are not public."""
    ask = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["save"],
        names_which_can_be_offloaded=["offload"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return {decision: ask(name_p, name=decision) for decision in _DECISIONS}


VERDICT = _verdicts()


@functools.cache
def matches(pattern: str, name: str) -> bool:
    """Return if a pattern of `Policy.rules` matches a tagged value's name."""
    pattern_parts, (*scopes, last) = pattern.split("/"), name.split("/")
    if len(pattern_parts) == 1:
        scopes = []
    ends = (last,) if "." in pattern_parts[-1] else (last.partition(".")[0], last.rpartition(".")[2])
    return any(_components_match(pattern_parts, [*scopes, end]) for end in ends)


def _components_match(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_components_match(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _components_match(pattern[1:], name[1:])


def _problem(field: str, why: str) -> Problem:
    return Problem(field, f"{field}: {why}")


def _unmatched(source: str, pattern: str, names: list[str], one: str, many: str) -> Problem:
    why = f"matches no {one}"
    if not names:
        return _problem(source, f"{why}; the function tags nothing that the backward pass could use")
    near = nearest(pattern, [*names, *(n.rpartition("/")[2] for n in names)])
    if within := next((n for n in names if matches(f"**/{pattern}", n)), None):
        near = f"; in all scopes it is {f'**/{pattern}'!r}, which matches {within}"
    return _problem(source, why + f"; the {many} are {', '.join(names)}" * bool(many) + near)


def _choice(field: str, value: object, allowed: Iterable[str]) -> list[Problem]:
    if isinstance(value, str) and value in allowed:
        return []
    return [_problem(field, f"{short(value)} is not allowed; use {one_of(allowed)}{nearest(value, allowed)}")]


def _pairs(residuals: Any) -> list[tuple[Any, Any]]:
    return list(residuals.items() if isinstance(residuals, Mapping) else residuals)


def _last_of_each(pairs: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Decision], ...]:
    """Return the pairs without those that a later pair with the same pattern replaces."""
    rules: dict[str, Decision] = {}
    for pattern, decision in pairs:
        rules.pop(pattern, None)
        rules[pattern] = decision
    return tuple(rules.items())


def _residual_problems(residuals: Any) -> list[Problem]:
    is_pair = lambda p: isinstance(p, (tuple, list)) and len(p) == 2
    ordered = isinstance(residuals, Iterable) and not isinstance(residuals, (str, set, frozenset))
    if not ordered or not all(map(is_pair, _pairs(residuals))):
        return [_problem("residuals", f"{short(residuals)} is not a mapping of patterns to {', '.join(_DECISIONS)}")]
    problems = []
    for pattern, decision in _pairs(residuals):
        if why := _pattern_problem(pattern):
            problems.append(_problem(f"residuals[{short(pattern)}]", why))
        if isinstance(decision, Mapping):
            advice = _unnested(pattern, decision)
            problems.append(_problem(f"residuals[{short(pattern)}]", f"{short(decision)} is not a decision; {advice}"))
        else:
            problems += _choice(f"residuals[{short(pattern)}]", decision, _DECISIONS)
    return problems


def _unnested(pattern: Any, inside: Mapping[Any, Any]) -> str:
    pattern, first = f"{pattern!s:.60}", next(iter(inside), "fc1")
    return f"give each a line of its own, '{pattern}/{first}' for a scope's or '{pattern}.{first}' for a field's"


def _module_problems(modules: Any) -> list[Problem]:
    if not isinstance(modules, (tuple, list)):
        return [_problem("offload_modules", f"{short(modules)} is not a list of module names, such as ['moe_act']")]
    unknown = [problem for module in modules for problem in _choice("offload_modules", module, MODULES)]
    twice = [module for module in MODULES if modules.count(module) > 1]
    return unknown + [_problem("offload_modules", f"{m!r} is given more than once; once is enough") for m in twice]


def _pattern_problem(pattern: Any) -> str | None:
    if not isinstance(pattern, str) or not pattern:
        return "a pattern is a non-empty string, such as 'fc1' or 'attn/*'"
    if pattern.startswith("!"):
        return "patterns have no '!'; give the exception a later line of its own"
    if wrong := re.search(r"\s", pattern):
        return f"a pattern cannot have {wrong.group()!r}; '?' stands for any character"
    if "" in pattern.split("/"):
        return "a component is empty; write 'attn/q', without a slash at either end"
    if any("**" in c and c != "**" for c in pattern.split("/")):
        return "'**' stands for whole components; write 'moe/**' or 'moe/fc*'"
    return None


def _number_problems(policy: Policy) -> list[Problem]:
    problems = []
    if size_in_bytes(size := policy.min_offload_bytes) is None:
        why = "is not a size; use a number of bytes >= 0 or a string such as '512KiB', '1MiB' or '2GB'"
        problems.append(_problem("min_offload_bytes", f"{short(size)} {why}{nearest(size, _spellings(size))}"))
    if not _is_count(policy.resident_layers):
        why = "is not allowed; use a whole number >= 0"
        problems.append(_problem("resident_layers", f"{short(policy.resident_layers)} {why}"))
    wanted = policy.offload_layers
    fraction = isinstance(wanted, float) and 0 <= wanted <= 1
    if not (wanted == "all" or _is_count(wanted) or fraction):
        why = "is not allowed; use all, a whole number >= 0 (layers) or a fraction from 0.0 to 1.0"
        problems.append(_problem("offload_layers", f"{short(wanted)} {why}{nearest(wanted, ['all'])}"))
    return problems


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def size_in_bytes(value: object) -> int | None:
    """Return the bytes of 1048576 or '1MiB'; None for what is not a size."""
    if _is_count(value):
        return value  # type: ignore[return-value]
    number, unit = _number_and_unit(value) or ("", "")
    if not number or unit not in _UNITS:
        return None
    return math.floor(Fraction(number) * _UNITS[unit])  # in floats 2.01KB would be 2009 bytes


def _number_and_unit(value: object) -> tuple[str, str] | None:
    parts = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?) *([A-Za-z]*)", value.strip()) if isinstance(value, str) else None
    return (parts[1], parts[2]) if parts else None


def _spellings(value: object) -> list[str]:
    """Return the number of a size whose unit is unknown with each known unit."""
    number, unit = _number_and_unit(value) or ("", "")
    return [number + other for other in _UNITS if other] if unit not in _UNITS else []
