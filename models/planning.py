"""`remat.budget`: a run's policy is planned, printed, written beside its checkpoints, and kept when it continues."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from jaxoffload import Plan, Policy, UserError, plan
from models.config import Config, Remat
from models.files import atomic
from models.processes import differing_keys, say
from models.reading import as_config_error, config_error
from models.sharding import AnyMesh
from models.step import program

FILE = "plan.json"


def planned(config: Config, mesh: AnyMesh) -> tuple[Config, Plan | None]:
    """Return the config with the policy that fits in its budget, and the plan; as it is if it has no budget.

    Raises:
      ConfigError: nothing fits, or nothing can be planned here.
    """
    remat = config.remat
    if not isinstance(remat, Remat) or remat.budget is None:
        return config, None
    made = program(config, mesh)
    size = lambda given: None if given == "auto" else given
    how: dict[str, Any] = {"budget": size(remat.budget), "host_budget": size(remat.host_budget)}
    try:
        found = plan(made.step, made.state, made.tokens, machine=remat.machine, fixed=remat.fixed, **how)
    except (UserError, ValueError, NotImplementedError) as why:
        raise config_error("remat.budget", repr(remat.budget), " ".join(str(why).split())) from why
    return with_policy(config, found.policy), found


def with_policy(config: Config, policy: Policy) -> Config:
    """Return the config under a planned policy; it keeps the budget."""
    fields = {name: getattr(policy, name) for name in asdict(policy)}
    return replace(config, remat=replace(config.remat, **fields))


def plan_of_run(config: Config, mesh: AnyMesh, continues: bool) -> Config:
    """As `planned`, for a run: print the plan and write it to `train.out`, or keep the one that is there if the run
    `continues` under the same `remat`.

    Raises:
      ConfigError: as `planned`; the file cannot be read or written; or the processes' plans differ.
    """
    file, asked = Path(config.train.out) / FILE, asdict(config.remat)
    if asked.get("budget") is None:
        return config
    if continues and (before := _read(file)) and before["asked"] == json.loads(json.dumps(asked)):
        say(f"remat.budget = {asked['budget']!r}: the plan of {file} stays")
        return with_policy(config, Policy(**before["policy"]))
    chosen, found = planned(config, mesh)
    assert found is not None
    if differing_keys({"policy": found.policy}):
        why = "the processes would plan differently; give a size, and remat.machine a file that all can read"
        raise config_error("remat.budget", repr(asked["budget"]), why)
    say(str(found))
    _write(file, {"asked": asked, "policy": asdict(found.policy), "plan": json.loads(found.to_json())})
    return chosen


def _read(file: Path) -> dict[str, Any] | None:
    """Return what `plan_of_run` wrote; None if there is no such file."""
    with as_config_error("train.out", str(file), "a plan that can be read"):
        if not file.exists():
            return None
        text = file.read_text()
    try:
        return json.loads(text)
    except ValueError as why:
        raise config_error("train.out", repr(str(file)), f"is not a plan ({why}); remove it to plan anew") from why


def _write(file: Path, what: dict[str, Any]) -> None:
    if jax.process_index() == 0:
        with as_config_error("train.out", str(file), "a folder that can be written"):
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic(file) as stream:
                stream.write(json.dumps(what, indent=1).encode())
