"""The report as JSON, for programs: python -m models.train CONFIG --report --json."""

import json
from typing import Any

from models.config import Config
from models.needs import (
    interleaves,
    parameter_count,
    prediction,
    schedule_of,
    stages,
    traced_program,
    weighed,
)
from models.transformer import flops_per_token


def report_json(config: Config) -> str:
    """Return what `report` does as a JSON object, with sizes in bytes.

    `residuals` is the table of one microbatch, as `jaxoffload.Residuals.to_json` writes it. `traced_as` has the kernels
    that were traced in place of those of the config.

    Raises:
      ConfigError: as `summary`.
    """
    traced, made, plan = traced_program(config)
    table, found, _ = weights = weighed(traced, made)
    mesh = made.tokens.sharding.mesh
    total_and_each = lambda sizes: dict(zip(("total", "per_device"), sizes, strict=True))
    content: dict[str, Any] = {
        "parameters": parameter_count(made),
        "flops_per_token": flops_per_token(config.model, config.train.seq_len),
        "mesh": dict(mesh.shape),
        "microbatches": {"count": config.train.grad_accumulation, "interleaved": interleaves(traced, table)},
        "traced_as": {
            f"model.{key}": kernel
            for key in ("attention", "grouped")
            if (kernel := getattr(traced.model, key)) != getattr(config.model, key)
        },
        "residuals": json.loads(table.to_json()),
        "memory": {
            "parameters": total_and_each(found.parameters),
            "gradients": total_and_each(found.gradients),
            "optimizer": total_and_each(found.optimizer),
            "residuals_on_the_device": total_and_each(found.on_device),
            "residuals_on_the_host": total_and_each(found.on_host),
        },
    }
    if config.mesh.stage > 1:
        schedule = schedule_of(config)
        content["pipeline"] = {
            "ticks": schedule.ticks,
            "bubble": schedule.bubble,
            "slots": schedule.slots,
            "stages": [stage._asdict() for stage in stages(traced, made, table)],
        }
    if plan:
        content["plan"] = json.loads(plan.to_json())
    if predicted := prediction(made, weights):
        content["step"] = json.loads(predicted.to_json())
    return json.dumps(content)
