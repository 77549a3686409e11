//! Whole trajectories against PyTorch's own, recorded by `scripts/torch_fixtures.py`.

#![allow(clippy::unwrap_used, reason = "the fixture is our own file")]

use serde::Deserialize;
use skep_math::{Kind, Optimiser, OptimiserSettings, Schedule, Segment};

/// The bound that the project promises.
const TOLERANCE: f64 = 1e-5;

/// Values below this are compared as if they were this large. On their way parameters are of size 1
/// to 10, where one `f32` rounding is up to 5e-7, and PyTorch fuses multiply and add where we do not.
/// A value that comes back to near zero keeps those absolute errors, so it cannot be held to 1e-5 of
/// itself; 1e-5 of 0.1 is about two roundings at size 10.
const FLOOR: f64 = 0.1;

#[derive(Deserialize)]
struct Recorded {
    tensors: Vec<Tensor>,
    start: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    variants: Vec<Variant>,
}

#[derive(Deserialize)]
struct Tensor {
    group: String,
    length: usize,
}

#[derive(Deserialize)]
struct Variant {
    name: String,
    settings: OptimiserSettings,
    scale: f32,
    total: Option<u64>,
    rates: Vec<f64>,
    norms: Option<Vec<f64>>,
    steps: Vec<Vec<f32>>,
}

fn recorded() -> Recorded {
    serde_json::from_str(include_str!("fixtures/torch.json")).unwrap()
}

fn segments(tensors: &[Tensor]) -> Vec<Segment> {
    let mut start = 0;
    tensors
        .iter()
        .map(|tensor| {
            let range = start..start + tensor.length;
            start = range.end;
            Segment { parameter: range.clone(), gradient: range, group: tensor.group.clone() }
        })
        .collect()
}

#[test]
fn every_trajectory_is_that_of_pytorch() {
    let recorded = recorded();
    for variant in &recorded.variants {
        let name = &variant.name;
        let mut worst: f64 = 0.0;
        let mut optimiser =
            Optimiser::new(variant.settings.clone(), segments(&recorded.tensors), variant.total)
                .unwrap();
        assert_eq!(variant.steps.len(), recorded.gradients.len());
        let mut old = recorded.start.clone();
        for (step, gradient) in recorded.gradients.iter().enumerate() {
            let mut new = vec![f32::NAN; old.len()];
            let report = optimiser.stage(&old, gradient, variant.scale, &mut new).unwrap();
            assert!(report.finite, "{name}, step {step}");
            optimiser.commit();

            let rate = variant.rates[step];
            assert!((report.rate - rate).abs() <= 1e-12, "{name}, step {step}: {report:?} {rate}");
            if let Some(norms) = &variant.norms {
                let norm = norms[step];
                assert!((report.norm - norm).abs() <= 1e-6 * norm, "{name}: {report:?} {norm}");
                let limit = variant.settings.clip_norm.unwrap();
                assert_eq!(report.clipped, norm > limit, "{name}, step {step}");
            }
            for (place, (&ours, &theirs)) in new.iter().zip(&variant.steps[step]).enumerate() {
                let (ours, theirs) = (f64::from(ours), f64::from(theirs));
                let error = (ours - theirs).abs() / theirs.abs().max(FLOOR);
                worst = worst.max(error);
                assert!(
                    error <= TOLERANCE,
                    "{name}, step {step}, value {place}: {ours} instead of {theirs} ({error:e})"
                );
            }
            old = new;
        }
        assert_eq!(optimiser.steps(), recorded.gradients.len() as u64);
        println!("{name}: largest error {worst:.1e}");
    }
}

/// A fixture that lost a variant would let the test above pass without it.
#[test]
fn every_setting_is_recorded() {
    let variants = recorded().variants;
    type Wanted = (&'static str, fn(&OptimiserSettings) -> bool);
    let wanted: [Wanted; 17] = [
        ("plain sgd", |s| s.kind == Kind::Sgd && s.momentum == 0.0 && s.weight_decay == 0.0),
        ("momentum", |s| s.kind == Kind::Sgd && s.momentum > 0.0 && !s.nesterov),
        ("nesterov", |s| s.nesterov),
        ("dampening", |s| s.dampening > 0.0 && s.weight_decay > 0.0),
        ("adam", |s| s.kind == Kind::Adam && s.weight_decay == 0.0),
        ("adam with decay", |s| s.kind == Kind::Adam && s.weight_decay > 0.0),
        ("adamw", |s| s.kind == Kind::AdamW && s.weight_decay > 0.0),
        ("amsgrad", |s| s.amsgrad),
        ("rmsprop", |s| s.kind == Kind::RmsProp && !s.centred && s.momentum == 0.0),
        ("rmsprop momentum", |s| s.kind == Kind::RmsProp && !s.centred && s.momentum > 0.0),
        ("centred", |s| s.centred && s.momentum == 0.0),
        ("centred momentum", |s| s.centred && s.momentum > 0.0),
        ("clipping", |s| s.clip_norm.is_some()),
        ("warm-up", |s| matches!(s.schedule, Schedule::Constant { warm_up: 1.. })),
        ("step", |s| matches!(s.schedule, Schedule::Step { .. })),
        ("cosine", |s| matches!(s.schedule, Schedule::Cosine { steps: None, .. })),
        ("cosine, warm-up", |s| matches!(s.schedule, Schedule::Cosine { warm_up: 1.., .. })),
    ];
    for (name, wanted) in wanted {
        assert!(variants.iter().any(|variant| wanted(&variant.settings)), "{name}");
    }
    for variant in &variants {
        assert_eq!(variant.steps.len(), 30, "{}", variant.name);
        if let (Some(norms), Some(limit)) = (&variant.norms, variant.settings.clip_norm) {
            let clipped = norms.iter().filter(|norm| **norm > limit).count();
            assert!(clipped > 3 && clipped < 27, "{}: {clipped} steps clipped", variant.name);
        }
    }
}
