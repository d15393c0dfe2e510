"""`infaas admin VERB`: an operator's changes to a running system, sent as `infaas.admin.<verb>` on the bus."""

import asyncio
from typing import Annotated, Any

from cyclopts import Parameter

from infaas.cli.options import DataDir, Json, Names, Whole, json_or_text, names
from infaas.cli.output import meant, render_done, show, usage
from infaas.connecting import connect

_TAKEN_BACK = ("latency_ms", "default_output", "slo_target")  # by `--no-latency-ms` and so on
_APP = ("latency_ms", "default_output", "min_instances", "input_type", "slo_target", "accuracy")
_SELECTION = ("policy", "members", "eta", "contextual", "confidence", "wait_share", "cache_mb")
# verb: the fields that it needs, and the fields that it may have
VERBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "add-app": (("app",), _APP),
    "set-app": (("app",), _APP),
    "delete-app": (("app",), ()),
    "link-model": (("app", "model"), ("version", "latency_ms", "default_output")),
    "unlink-model": (("app", "model"), ()),
    "set-version": (("app", "model", "version"), ()),
    "set-replicas": (("count",), ("app", "model")),
    "set-target": (("app", "slo_target"), ()),
    "set-selection": (("app",), _SELECTION),
    "reset-selection": (("app",), ("context",)),
    "delete-version": (("model", "version"), ()),
    "release-variant": (("variant",), ("worker",)),
    "set-batching": ((), ("app", "model", "variant", "policy", "batch", "slo_ms", "wait_ms", "quantum_ms", "contexts")),
}

Flag = Annotated[bool, Parameter(negative="")]
Version = Annotated[str | None, Parameter(name=["--version", "--model-version"])]
InputType = Annotated[
    str | None, Parameter(help="Type of an item of the app's inputs: integers, floats, doubles, bytes or strings.")
]


def admin(
    verb: str,
    /,
    app: str | None = None,
    *,
    model: str | None = None,
    version: Version = None,
    variant: str | None = None,
    worker: str | None = None,
    latency_ms: float | None = None,
    no_latency_ms: Flag = False,
    default_output: str | None = None,
    no_default_output: Flag = False,
    min_instances: Whole | None = None,
    count: Whole | None = None,
    input_type: InputType = None,
    slo_target: float | None = None,
    no_slo_target: Flag = False,
    accuracy: str | None = None,
    policy: str | None = None,
    members: Names = None,
    eta: float | None = None,
    contextual: Flag = False,
    confidence: float | None = None,
    wait_share: float | None = None,
    cache_mb: float | None = None,
    context: str | None = None,
    batch: Whole | None = None,
    slo_ms: float | None = None,
    wait_ms: float | None = None,
    quantum_ms: float | None = None,
    contexts: Whole | None = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Change a running system: its apps, the models that they serve, how batches are formed, and quarantined variants. Prints `done`.

    Nothing restarts. The verbs, with the options that each needs and may have:

    * add-app, set-app: `--app`; may have `--latency-ms`, `--default-output`, `--min-instances`, `--input-type`,
      `--slo-target`, `--accuracy`
    * set-app may also have `--no-latency-ms`, `--no-default-output`, `--no-slo-target`, which take a setting back; set-target `--no-slo-target`
    * delete-app: `--app`
    * link-model: `--app`, `--model`; may have `--version`, `--latency-ms`, `--default-output`
    * unlink-model: `--app`, `--model`
    * set-version: `--app`, `--model`, `--version` (a newer or an older one)
    * set-replicas: `--count` and `--app`, `--model` or both
    * set-target: `--app`, `--slo-target`
    * set-selection: `--app`; may have `--policy`, `--members`, `--eta`, `--contextual`, `--confidence`, `--wait-share`,
      `--cache-mb`. What is left out has its default, not the value before; without a policy and a cache it ends
    * reset-selection: `--app`; may have `--context`. What feedback has taught is forgotten
    * delete-version: `--model`, `--version`
    * release-variant: `--variant`; may have `--worker`
    * set-batching: one of `--app`, `--model`, `--variant`; may have `--policy` (without it, the rule is removed), `--batch`, `--slo-ms`,
      `--wait-ms`, `--quantum-ms`, `--contexts`

    The app may also stand right after the verb.

    Example: `infaas admin set-version digits --model cnn --version 1`

    Example: `infaas admin set-selection digits --policy exp4 --members mlp cnn --cache-mb 64`

    Parameters
    ----------
    verb
        What to change.
    app
        Name of the app.
    model
        Name of the model.
    version
        Version of the model. link-model takes the newest by default.
    variant
        The quarantined variant that may be loaded again (release-variant), or the one whose batches the rule is for (set-batching).
    worker
        Release the variant on this worker only (release-variant).
    latency_ms
        The app's latency objective, in milliseconds.
    no_latency_ms
        The app has no latency objective any more (set-app).
    default_output
        What the app answers if no model can answer in time, as JSON. A text that is no JSON stands for itself.
    no_default_output
        The app has no default output any more (set-app).
    min_instances
        Instances that the app always keeps.
    count
        Instances that the app always keeps, or of the model's best variant in this app or in all apps that link it (set-replicas).
    slo_target
        The share of the app's queries to be answered in time, above 0 and below 1.
    no_slo_target
        The app has no target of its own any more, but autoscaler.slo_target of the settings (set-app, set-target).
    accuracy
        What a query gets that states no accuracy: own, a variant at most 0.5 points below its model (the default), or any.
    policy
        How several models answer a query together (set-selection): exp3, exp4, majority, weighted, or a class of your own as
        module:Class. Left out: one variant answers. How batches are formed (set-batching): edf, fixed, aimd, quantile, delayed or threshold.
    members
        The models that are asked. Default: all that the app links.
    eta
        Learning rate of exp3 and exp4, 0 to 1. Default: 0.1.
    contextual
        Weights of their own for each `context` of the app's queries.
    confidence
        Share of the members that must agree, 0 to 1. Below it the app's default output is given. Default: 0.
    wait_share
        Share of the latency objective after which the answer is made of what is there, above 0 and at most 1. Default: 0.97.
    cache_mb
        MB of answers that each dispatcher keeps for equal queries. Default: 0, none.
    context
        Forget only what was learnt in this context (reset-selection).
    batch
        Items of a batch: of fixed the size, of the others the most. By default the variant's own largest.
    slo_ms
        Milliseconds that a batch may take (aimd, quantile). By default half of what its most urgent query allows.
    wait_ms
        Milliseconds that a batch waits for more queries (delayed).
    quantum_ms
        Milliseconds over which arrivals are counted (threshold), 0.5 to 10,000. Default: 5.
    contexts
        Batches of one instance at a time, 1 to 64. Default: 1.

    """
    if verb not in VERBS:
        usage(f"there is no verb {verb!r}: use {', '.join(VERBS)}{meant(verb, VERBS)}")
    fields: dict[str, Any] = {
        "app": app,
        "model": model,
        "version": version,
        "variant": variant,
        "worker": worker,
        "latency_ms": latency_ms,
        "default_output": None if default_output is None else json_or_text(default_output),
        "min_instances": min_instances,
        "count": count,
        "input_type": input_type,
        "slo_target": slo_target,
        "accuracy": accuracy,
        "policy": policy,
        "members": None if members is None else [*names("--members", members, "names of models")],
        "eta": eta,
        "contextual": contextual or None,
        "confidence": confidence,
        "wait_share": wait_share,
        "cache_mb": cache_mb,
        "context": context,
        "batch": batch,
        "slo_ms": slo_ms,
        "wait_ms": wait_ms,
        "quantum_ms": quantum_ms,
        "contexts": contexts,
    }
    given = {field: value for field, value in fields.items() if value is not None}
    for field, back in zip(_TAKEN_BACK, (no_latency_ms, no_default_output, no_slo_target), strict=True):
        if not back:
            continue
        option = _option(f"no_{field}")
        if verb != "set-app" and (verb, field) != ("set-target", "slo_target"):
            usage(f"{verb} takes no {option}")
        if field in given:
            usage(f"{_option(field)} and {option}: give one of both")
        given[field] = None
    needed, possible = VERBS[verb]
    missing = [_option(field) for field in needed if field not in given]
    if missing:
        usage(f"{verb} needs {' and '.join(missing)}")
    unused = [_option(field) for field in given if field not in (*needed, *possible)]
    if unused:
        usage(f"{verb} takes no {', '.join(unused)}")
    if verb == "set-batching" and sum(scope in given for scope in ("app", "model", "variant")) != 1:
        usage("set-batching needs exactly one of --app, --model, --variant")

    async def send() -> dict[str, Any]:
        async with connect(data_dir=data_dir) as client:
            return await client.admin(verb, **given)

    show(asyncio.run(send()), json, render_done)
    return 0


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
