#!/usr/bin/python3
"""Records what PyTorch's optimisers do, for crates/math/tests/torch.rs to compare with.

    /usr/bin/python3 scripts/torch_fixtures.py

Writes crates/math/tests/fixtures/torch.json: fixed start values and gradients, and for every variant
the settings as Skep reads them and the parameters after each step, together with the rate and
(with clipping) the norm that PyTorch used. Run it again only when a variant is added; the recorded
file is what the tests trust.
"""

import json
import pathlib

import numpy
import torch
from torch.optim import lr_scheduler

STEPS = 30
# Two groups of two tensors each, by their place in the flat buffer.
TENSORS = [("body", (2, 3)), ("body", (3,)), ("head", (3, 2)), ("head", (2,))]
LENGTHS = [int(numpy.prod(shape)) for _, shape in TENSORS]
OUTPUT = pathlib.Path(__file__).parent.parent / "crates/math/tests/fixtures/torch.json"

random = numpy.random.default_rng(20240229)
START = random.standard_normal(sum(LENGTHS)).astype(numpy.float32)
# Magnitudes from 0.01 to 10 and a slow drift, so that averages, decay and clipping all matter.
SIZE = 10.0 ** random.uniform(-2, 1, sum(LENGTHS))
GRADIENTS = [
    (SIZE * (random.standard_normal(sum(LENGTHS)) + numpy.sin(step / 5))).astype(numpy.float32)
    for step in range(STEPS)
]


def numbers(values):
    """Nine digits name an f32 exactly."""
    return [float(f"{float(value):.9g}") for value in values]


def split(flat):
    pieces = numpy.split(flat, numpy.cumsum(LENGTHS)[:-1])
    return [piece.reshape(shape) for piece, (_, shape) in zip(pieces, TENSORS)]


def record(name, settings, optimiser, scheduler=None, scale=1.0, total=None, norm=None):
    """One trajectory. `optimiser(groups)` gets the parameter groups; the head's rate and decay are
    filled in from the settings' own group, so that both sides read the same numbers."""
    parameters = [torch.nn.Parameter(torch.tensor(piece)) for piece in split(START)]
    groups = []
    for group in ("body", "head"):
        own = settings.get("groups", {}).get(group, {})
        entry = {"params": [p for p, (of, _) in zip(parameters, TENSORS) if of == group]}
        if "rate" in own:
            entry["lr"] = own["rate"]
        if "rate_factor" in own:
            entry["lr"] = own["rate_factor"] * settings["rate"]
        if "weight_decay" in own:
            entry["weight_decay"] = own["weight_decay"]
        groups.append(entry)
    optimiser = optimiser(groups)
    scheduler = scheduler(optimiser) if scheduler else None
    steps, rates, norms = [], [], []
    for flat in GRADIENTS:
        for parameter, piece in zip(parameters, split(flat)):
            parameter.grad = torch.tensor(piece) * scale
        if norm is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, norm)))
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        if scheduler:
            scheduler.step()
        steps.append(numbers(torch.cat([p.detach().flatten() for p in parameters])))
    variant = {"name": name, "settings": settings, "scale": scale, "total": total}
    return variant | {"rates": rates, "norms": norms or None, "steps": steps}


HEAD = {"head": {"rate_factor": 0.5}}


def sgd(**options):
    return lambda groups: torch.optim.SGD(groups, **options)


def warm_up_then(steps, after):
    """The linear warm-up that ends at the full rate, then another schedule."""

    def make(optimiser):
        linear = lr_scheduler.LinearLR(optimiser, start_factor=1 / steps, total_iters=steps - 1)
        return lr_scheduler.SequentialLR(optimiser, [linear, after(optimiser)], milestones=[steps])

    return make


def scheduled(name, schedule, scheduler, total=None):
    settings = {"kind": "sgd", "rate": 0.05, "momentum": 0.9, "schedule": schedule, "groups": HEAD}
    return record(name, settings, sgd(lr=0.05, momentum=0.9), scheduler, total=total)


def variants():
    yield record(
        "sgd",
        {"kind": "sgd", "rate": 0.05, "groups": {"head": {"rate": 0.125}}},
        sgd(lr=0.05),
        scale=1 / 3,
    )
    yield record(
        "sgd with decay",
        {"kind": "sgd", "rate": 0.05, "weight_decay": 0.1, "groups": {"head": {"weight_decay": 0.0}}},
        sgd(lr=0.05, weight_decay=0.1),
    )
    yield record(
        "sgd with momentum",
        {"kind": "sgd", "rate": 0.05, "momentum": 0.9, "groups": HEAD},
        sgd(lr=0.05, momentum=0.9),
    )
    yield record(
        "sgd with nesterov",
        {"kind": "sgd", "rate": 0.05, "momentum": 0.9, "nesterov": True, "groups": HEAD},
        sgd(lr=0.05, momentum=0.9, nesterov=True),
    )
    yield record(
        "sgd with dampening and decay",
        {"kind": "sgd", "rate": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05, "groups": HEAD},
        sgd(lr=0.05, momentum=0.8, dampening=0.3, weight_decay=0.05),
    )
    for kind, make in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        # AdamW's default decay is not Adam's, and neither is written down here.
        yield record(kind, {"kind": kind, "rate": 0.02, "groups": HEAD}, lambda groups: make(groups, lr=0.02))
        yield record(
            f"{kind} with decay",
            {"kind": kind, "rate": 0.02, "weight_decay": 0.2, "groups": {"head": {"rate": 0.1, "weight_decay": 0.4}}},
            lambda groups: make(groups, lr=0.02, weight_decay=0.2),
        )
        yield record(
            f"{kind} with other betas and amsgrad",
            {"kind": kind, "rate": 0.02, "betas": [0.8, 0.9], "epsilon": 1e-3, "amsgrad": True, "groups": HEAD},
            lambda groups: make(groups, lr=0.02, betas=(0.8, 0.9), eps=1e-3, amsgrad=True),
        )
    for name, settings in (
        ("rmsprop", {}),
        ("rmsprop with momentum and decay", {"alpha": 0.9, "momentum": 0.7, "weight_decay": 0.1}),
        ("rmsprop centred", {"alpha": 0.95, "centred": True}),
        ("rmsprop centred with momentum", {"alpha": 0.9, "epsilon": 1e-4, "centred": True, "momentum": 0.5}),
    ):
        spelling = {"epsilon": "eps", "centred": "centered"}
        options = {spelling.get(key, key): value for key, value in settings.items()}
        yield record(
            name,
            {"kind": "rmsprop", "rate": 0.01, "groups": HEAD} | settings,
            lambda groups: torch.optim.RMSprop(groups, lr=0.01, **options),
        )
    # A limit in the middle of the norms, so that some steps are clipped and some are not.
    limit = 12.0
    yield record(
        "sgd clipped",
        {"kind": "sgd", "rate": 0.05, "momentum": 0.9, "clip_norm": limit, "groups": HEAD},
        sgd(lr=0.05, momentum=0.9),
        norm=limit,
    )
    yield record(
        "adam clipped",
        {"kind": "adam", "rate": 0.02, "clip_norm": limit / 4, "groups": HEAD},
        lambda groups: torch.optim.Adam(groups, lr=0.02),
        scale=0.25,
        norm=limit / 4,
    )
    yield scheduled(
        "warm-up",
        {"kind": "constant", "warm_up": 10},
        lambda optimiser: lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 10)),
    )
    yield scheduled(
        "steps",
        {"kind": "step", "every": 7, "factor": 0.3},
        lambda optimiser: lr_scheduler.StepLR(optimiser, 7, gamma=0.3),
    )
    yield scheduled(
        "steps after warm-up",
        {"kind": "step", "every": 6, "factor": 0.5, "warm_up": 5},
        warm_up_then(5, lambda optimiser: lr_scheduler.StepLR(optimiser, 6, gamma=0.5)),
    )
    yield scheduled(
        "cosine",
        {"kind": "cosine"},
        lambda optimiser: lr_scheduler.CosineAnnealingLR(optimiser, STEPS),
        total=STEPS,
    )
    # PyTorch's floor is a rate and ours a factor, so here both groups have one rate.
    settings = {"kind": "sgd", "rate": 0.05, "schedule": {"kind": "cosine", "steps": 40, "floor": 0.1, "warm_up": 8}}
    yield record(
        "cosine after warm-up with a floor",
        settings,
        sgd(lr=0.05),
        warm_up_then(8, lambda optimiser: lr_scheduler.CosineAnnealingLR(optimiser, 32, eta_min=0.005)),
        total=50,
    )


def main():
    recorded = {
        "torch": torch.__version__,
        "tensors": [{"group": group, "length": length} for (group, _), length in zip(TENSORS, LENGTHS)],
        "start": numbers(START),
        "gradients": [numbers(gradient) for gradient in GRADIENTS],
        "variants": list(variants()),
    }
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(recorded, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n")
    print(f"{OUTPUT}: {len(recorded['variants'])} variants, {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
