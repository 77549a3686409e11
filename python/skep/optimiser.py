"""torch's optimisers as settings of a hive's, which has the same ones with the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import Misuse


def settings(optimiser: Any, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of an optimiser, and the roles that put its parameters into their groups.

    Takes a dict in the form of the job file's `[optimiser]`, or a `torch.optim.Optimizer`.
    """
    if isinstance(optimiser, Mapping):
        return dict(optimiser), {}
    kind = type(optimiser).__name__.lower()
    if not hasattr(optimiser, "param_groups") or kind not in ("sgd", "adam", "adamw", "rmsprop"):
        raise Misuse(
            f"the hive has no optimiser like {type(optimiser).__name__}",
            "use SGD, Adam, AdamW or RMSprop, or a dict such as {'kind': 'adam', 'rate': 0.001}",
        )
    first, *others = optimiser.param_groups
    for group in optimiser.param_groups:
        if group.get("maximize"):
            raise Misuse("the hive cannot maximize", "change the sign of the loss")
    chosen = {"kind": kind, "rate": float(first["lr"]), **_of_group(kind, first)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    roles: dict[str, str] = {}
    groups: dict[str, Any] = {}
    for at, group in enumerate(others, start=1):
        name = f"group{at}"
        if _of_group(kind, group, decay=False) != _of_group(kind, first, decay=False):
            raise Misuse(
                f"parameter group {at} differs from the first in more than lr and weight_decay"
            )
        groups[name] = {"rate": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
        for parameter in group["params"]:
            if id(parameter) in names and parameter.requires_grad:
                roles[names[id(parameter)]] = f"trainable:{name}"
    if groups:
        chosen["groups"] = groups
    held = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise Misuse(
                f"the optimiser does not have `{name}`, which requires a gradient",
                "freeze it with requires_grad_(False), or give it to the optimiser",
            )
    return chosen, roles


def _of_group(kind: str, group: Mapping[str, Any], decay: bool = True) -> dict[str, Any]:
    """Settings besides the rate; those at 0 or false are left out, as they are the defaults."""
    names = {
        "sgd": ["momentum", "dampening", "nesterov"],
        "adam": ["betas", "eps", "amsgrad"],
        "adamw": ["betas", "eps", "amsgrad"],
        "rmsprop": ["momentum", "alpha", "eps", "centered"],
    }[kind]
    renamed = {"eps": "epsilon", "centered": "centred"}
    found: dict[str, Any] = {}
    for name in names:
        value = group[name]
        if value or name in ("eps", "alpha"):
            found[renamed.get(name, name)] = list(value) if isinstance(value, tuple) else value
    if decay and (group["weight_decay"] or kind == "adamw"):
        found["weight_decay"] = float(group["weight_decay"])
    return found


def policy(text: Any) -> dict[str, Any]:
    """`sync:4,backup=1` as a table, as on the command line; tables are taken as they are."""
    if isinstance(text, Mapping):
        return dict(text)
    kind, _, rest = str(text).partition(":")
    table: dict[str, Any] = {"kind": kind}
    main = {"batch": "size", "sync": "slots"}.get(kind)
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            if main is None:
                raise Misuse(f"`{text}` is not a policy", "such as batch:4, async or sync:2")
            name, value = main, name
        try:
            table[name] = float(value) if "." in value else int(value)
        except ValueError:
            raise Misuse(f"`{part}` in the policy is not a number") from None
    return table
