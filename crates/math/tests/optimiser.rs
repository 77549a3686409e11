//! What every optimiser keeps to, whatever its rule: staged steps change nothing, snapshots
//! continue bit for bit, what is not finite is never kept.

#![allow(clippy::unwrap_used, reason = "a test that unwraps an error has failed, as it should")]

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use skep_math::{
    GroupSettings, Kind, MathError, Optimiser, OptimiserSettings, OptimiserState, Schedule, Segment,
};

/// Settings that use every rule and every buffer.
fn settings() -> impl Strategy<Value = OptimiserSettings> {
    let base = OptimiserSettings::new;
    let kind = prop_oneof![
        Just(base(Kind::Sgd)),
        Just(OptimiserSettings { momentum: 0.9, ..base(Kind::Sgd) }),
        Just(OptimiserSettings { momentum: 0.9, nesterov: true, ..base(Kind::Sgd) }),
        Just(OptimiserSettings { momentum: 0.9, dampening: 0.5, ..base(Kind::Sgd) }),
        Just(base(Kind::Adam)),
        Just(base(Kind::AdamW)),
        Just(OptimiserSettings { amsgrad: true, ..base(Kind::AdamW) }),
        Just(base(Kind::RmsProp)),
        Just(OptimiserSettings { momentum: 0.5, ..base(Kind::RmsProp) }),
        Just(OptimiserSettings { centred: true, ..base(Kind::RmsProp) }),
        Just(OptimiserSettings { centred: true, momentum: 0.5, ..base(Kind::RmsProp) }),
    ];
    let decay = prop_oneof![Just(0.0), Just(0.1)];
    let clip_norm = prop_oneof![Just(None), Just(Some(1.0))];
    let schedule = prop_oneof![
        Just(Schedule::default()),
        Just(Schedule::Step { every: 2, factor: 0.5, warm_up: 3 })
    ];
    (kind, decay, clip_norm, schedule).prop_map(|(kind, weight_decay, clip_norm, schedule)| {
        let head = GroupSettings { rate_factor: Some(3.0), ..GroupSettings::default() };
        OptimiserSettings {
            weight_decay,
            clip_norm,
            schedule,
            groups: BTreeMap::from([("head".to_owned(), head)]),
            ..kind
        }
    })
}

/// A number for each place, all different and the same every time.
fn noise(length: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..length).map(|_| next()).collect()
}

/// Tensors one after the other, with gaps between them in both buffers.
fn layout(lengths: &[usize], gaps: [usize; 2], heads: usize) -> Vec<Segment> {
    let [mut parameter, mut gradient] = gaps;
    let mut segments = Vec::new();
    for (index, &length) in lengths.iter().enumerate() {
        segments.push(Segment {
            parameter: parameter..parameter + length,
            gradient: gradient..gradient + length,
            group: if index < heads { "head" } else { "body" }.to_owned(),
        });
        parameter += length + gaps[0];
        gradient += length + gaps[1];
    }
    segments
}

fn dense(length: usize) -> Vec<Segment> {
    layout(&[length], [0, 0], 0)
}

/// One committed step.
fn step(optimiser: &mut Optimiser, parameters: &mut Vec<f32>, gradient: &[f32], scale: f32) {
    let mut new = parameters.clone();
    assert!(optimiser.stage(parameters, gradient, scale, &mut new).unwrap().finite);
    optimiser.commit();
    *parameters = new;
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A state by value, so that comparing it later does not compare a buffer with itself.
fn copied(state: &OptimiserState) -> (u64, Vec<(String, Vec<u32>)>) {
    let buffers = state.buffers.iter().map(|(name, values)| (name.clone(), bits(values)));
    (state.steps, buffers.collect())
}

proptest! {
    #[test]
    fn staging_without_commit_changes_nothing(settings in settings(), length in 1_usize..3000, warm in 0_u32..4) {
        let mut optimiser = Optimiser::new(settings, dense(length), None).unwrap();
        let mut parameters = noise(length, 1);
        for seed in 0..warm {
            step(&mut optimiser, &mut parameters, &noise(length, 10 + seed), 0.5);
        }
        let before = copied(&optimiser.snapshot());
        let mut expected = parameters.clone();
        let staged = optimiser.stage(&parameters, &noise(length, 99), 0.5, &mut expected).unwrap();

        for seed in 200..203 {
            let mut other = parameters.clone();
            optimiser.stage(&parameters, &noise(length, seed), 2.0, &mut other).unwrap();
            prop_assert_ne!(bits(&other), bits(&parameters));
            optimiser.discard();
            prop_assert_eq!(copied(&optimiser.snapshot()), before.clone());
        }

        let mut again = parameters.clone();
        let report = optimiser.stage(&parameters, &noise(length, 99), 0.5, &mut again).unwrap();
        prop_assert_eq!(report, staged);
        prop_assert_eq!(bits(&again), bits(&expected));
    }

    #[test]
    fn a_restored_run_continues_bit_for_bit(settings in settings(), length in 1_usize..3000, before in 0_u32..5) {
        let mut first = Optimiser::new(settings.clone(), dense(length), None).unwrap();
        let mut parameters = noise(length, 1);
        for seed in 0..before {
            step(&mut first, &mut parameters, &noise(length, 10 + seed), 0.5);
        }
        let saved = first.snapshot();
        let saved_bits = copied(&saved);
        let mut continued = parameters.clone();
        let mut second = Optimiser::new(settings, dense(length), None).unwrap();
        // A step of its own first: restoring has to leave nothing of it.
        step(&mut second, &mut noise(length, 2), &noise(length, 3), 1.0);
        let mut shuffled = saved.clone();
        shuffled.buffers.reverse();
        second.restore(shuffled).unwrap();
        for seed in 50..55 {
            step(&mut first, &mut parameters, &noise(length, seed), 0.5);
            step(&mut second, &mut continued, &noise(length, seed), 0.5);
            prop_assert_eq!(bits(&parameters), bits(&continued));
            prop_assert_eq!(copied(&first.snapshot()), copied(&second.snapshot()));
        }
        // The checkpoint's own buffers were not written to by either of them.
        prop_assert_eq!(copied(&saved), saved_bits);
    }

    #[test]
    fn what_is_not_finite_is_reported_and_not_kept(
        settings in settings(),
        length in 1_usize..3000,
        place in any::<prop::sample::Index>(),
        bad in prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)],
    ) {
        let mut optimiser = Optimiser::new(settings, dense(length), None).unwrap();
        let mut parameters = noise(length, 1);
        step(&mut optimiser, &mut parameters, &noise(length, 2), 1.0);
        let before = copied(&optimiser.snapshot());
        let mut gradient = noise(length, 3);
        gradient[place.index(length)] = bad;
        let mut new = parameters.clone();
        let report = optimiser.stage(&parameters, &gradient, 1.0, &mut new).unwrap();
        prop_assert!(!report.finite);
        prop_assert_eq!(copied(&optimiser.snapshot()), before);
        prop_assert_eq!(optimiser.steps(), 1);
        step(&mut optimiser, &mut parameters, &noise(length, 4), 1.0);
    }

    #[test]
    fn how_tensors_lie_does_not_matter(
        settings in settings(),
        lengths in prop::collection::vec(0_usize..1500, 1..6),
        gaps in [0_usize..20, 0_usize..20],
        heads in 0_usize..6,
    ) {
        let dense = layout(&lengths, [0, 0], heads);
        let spread = layout(&lengths, gaps, heads);
        let total: usize = lengths.iter().sum();
        let room = |gap: usize| total + (lengths.len() + 1) * gap;
        let mut joined = Optimiser::new(settings.clone(), dense.clone(), None).unwrap();
        let mut apart = Optimiser::new(settings, spread.clone(), None).unwrap();
        prop_assert_eq!(joined.trainable(), total);

        let mut parameters = noise(total, 1);
        let untouched = f32::from_bits(0x4242_4242);
        let mut spread_parameters = vec![untouched; room(gaps[0])];
        for (near, far) in dense.iter().zip(&spread) {
            spread_parameters[far.parameter.clone()].copy_from_slice(&parameters[near.parameter.clone()]);
        }
        for seed in 2..5 {
            let gradient = noise(total, seed);
            // What lies between gradients must never be read.
            let mut spread_gradient = vec![f32::NAN; room(gaps[1])];
            for (near, far) in dense.iter().zip(&spread) {
                spread_gradient[far.gradient.clone()].copy_from_slice(&gradient[near.gradient.clone()]);
            }
            prop_assert_eq!(
                joined.norm_squared(&gradient, 0.3).to_bits(),
                apart.norm_squared(&spread_gradient, 0.3).to_bits()
            );
            step(&mut joined, &mut parameters, &gradient, 0.3);
            step(&mut apart, &mut spread_parameters, &spread_gradient, 0.3);
            prop_assert_eq!(copied(&joined.snapshot()), copied(&apart.snapshot()));
        }
        let mut gathered = vec![0.0; total];
        for (near, far) in dense.iter().zip(&spread) {
            gathered[near.parameter.clone()].copy_from_slice(&spread_parameters[far.parameter.clone()]);
            spread_parameters[far.parameter.clone()].fill(untouched);
        }
        prop_assert_eq!(bits(&gathered), bits(&parameters));
        prop_assert!(spread_parameters.iter().all(|value| *value == untouched));
    }

    #[test]
    fn parts_of_a_model_step_like_the_whole(settings in settings(), lengths in [1_usize..2000, 1_usize..2000]) {
        let total = lengths[0] + lengths[1];
        let mut whole = Optimiser::new(settings.clone(), dense(total), None).unwrap();
        let mut parts = lengths.map(|length| Optimiser::new(settings.clone(), dense(length), None).unwrap());
        let mut parameters = noise(total, 1);
        for seed in 2..5 {
            let gradient = noise(total, seed);
            // The same norm for all, down to its bits; how a caller adds the parts' up is its own affair.
            let norm_squared = whole.norm_squared(&gradient, 4.0);
            let sum: f64 = [&gradient[..lengths[0]], &gradient[lengths[0]..]]
                .iter().zip(&parts).map(|(part, optimiser)| optimiser.norm_squared(part, 4.0)).sum();
            prop_assert!((sum - norm_squared).abs() <= 1e-12 * norm_squared);

            let mut pieces = parameters.clone();
            let (left, right) = pieces.split_at_mut(lengths[0]);
            let mut reports = Vec::new();
            for (index, (range, new)) in [(0..lengths[0], left), (lengths[0]..total, right)].into_iter().enumerate() {
                let part = &mut parts[index];
                reports.push(part.stage_part(&parameters[range.clone()], &gradient[range], 4.0, norm_squared, new).unwrap());
                part.commit();
            }
            let mut new = parameters.clone();
            let report = whole.stage(&parameters, &gradient, 4.0, &mut new).unwrap();
            whole.commit();
            prop_assert_eq!(reports, vec![report; 2]);
            prop_assert_eq!(bits(&pieces), bits(&new));
            parameters = new;
        }
    }

    #[test]
    fn plain_sgd_is_one_multiplication_and_one_subtraction(
        length in 1_usize..2000,
        rate in -10_i32..3,
        scale in prop_oneof![Just(1.0_f32), Just(0.125), 0.001_f32..1.0],
    ) {
        let rate = 2.0_f64.powi(rate);
        let settings = OptimiserSettings { rate, ..OptimiserSettings::new(Kind::Sgd) };
        let mut optimiser = Optimiser::new(settings, dense(length), None).unwrap();
        let (old, gradient) = (noise(length, 1), noise(length, 2));
        let mut new = vec![f32::NAN; length];
        let report = optimiser.stage(&old, &gradient, scale, &mut new).unwrap();
        prop_assert!(report.finite && !report.clipped);
        let expected: Vec<f32> =
            old.iter().zip(&gradient).map(|(p, g)| p - (rate as f32) * (g * scale)).collect();
        prop_assert_eq!(bits(&new), bits(&expected));
        prop_assert_eq!(report.norm.to_bits(), optimiser.norm_squared(&gradient, scale).sqrt().to_bits());
    }
}

#[test]
fn whole_numbers_stay_exact() {
    let settings = OptimiserSettings { rate: 0.5, ..OptimiserSettings::default() };
    let mut optimiser = Optimiser::new(settings, dense(3), None).unwrap();
    let mut parameters = vec![0.0, 1.0, -7.0];
    for _ in 0..1000 {
        step(&mut optimiser, &mut parameters, &[8.0, -16.0, 24.0], 0.25);
    }
    assert_eq!(parameters, [-1000.0, 2001.0, -3007.0]);
}

#[test]
fn a_state_that_overflows_is_found_even_where_the_parameters_are_fine() {
    // The square of 1e30 is infinite in f32, and the step it makes is 1e30 / infinity = 0.
    for kind in [Kind::Adam, Kind::RmsProp] {
        let mut optimiser = Optimiser::new(OptimiserSettings::new(kind), dense(1), None).unwrap();
        let mut new = [0.0];
        let report = optimiser.stage(&[1.0], &[1e30], 1.0, &mut new).unwrap();
        assert!(new[0].is_finite() && !report.finite, "{kind}: {new:?} {report:?}");
    }
}

#[test]
fn parameters_that_overflow_are_found_even_where_gradient_and_state_are_fine() {
    for momentum in [0.0, 0.5] {
        let settings = OptimiserSettings { rate: 1.0, momentum, ..OptimiserSettings::default() };
        let mut optimiser = Optimiser::new(settings, dense(2000), None).unwrap();
        let (mut old, mut gradient) = (vec![0.0; 2000], vec![0.0; 2000]);
        (old[1500], gradient[1500]) = (3e38, -3e38);
        let report = optimiser.stage(&old, &gradient, 1.0, &mut vec![0.0; 2000]).unwrap();
        assert!(report.norm.is_finite() && !report.finite, "{report:?}");
    }
}

/// What must not be published must not be committed by mistake either.
#[test]
#[should_panic(expected = "staged and is finite")]
fn a_step_that_is_not_finite_cannot_be_committed() {
    let mut optimiser = Optimiser::new(OptimiserSettings::default(), dense(1), None).unwrap();
    optimiser.stage(&[0.0], &[f32::NAN], 1.0, &mut [0.0]).unwrap();
    optimiser.commit();
}

#[test]
#[should_panic(expected = "staged and is finite")]
fn a_discarded_step_cannot_be_committed() {
    let mut optimiser = Optimiser::new(OptimiserSettings::default(), dense(1), None).unwrap();
    optimiser.stage(&[0.0], &[1.0], 1.0, &mut [0.0]).unwrap();
    optimiser.discard();
    optimiser.commit();
}

#[test]
fn a_constant_gradient_does_not_break_centred_rmsprop() {
    // The variance of a constant is 0, and its rounding falls on either side.
    let settings =
        OptimiserSettings { centred: true, alpha: 0.5, ..OptimiserSettings::new(Kind::RmsProp) };
    let mut optimiser = Optimiser::new(settings, dense(200), None).unwrap();
    let mut parameters = vec![0.0; 200];
    let gradient: Vec<f32> = (1..=200).map(|value| 1.0 / value as f32).collect();
    for _ in 0..100 {
        step(&mut optimiser, &mut parameters, &gradient, 1.0);
    }
}

#[test]
fn clipping_shortens_long_gradients_only() {
    let settings =
        OptimiserSettings { rate: 1.0, clip_norm: Some(1.0), ..OptimiserSettings::default() };
    let mut optimiser = Optimiser::new(settings, dense(2), None).unwrap();
    let mut new = [0.0; 2];
    let long = optimiser.stage(&[0.0; 2], &[-6.0, -8.0], 0.5, &mut new).unwrap();
    assert!(long.clipped && long.norm == 5.0, "{long:?}");
    assert!((new[0] - 0.6).abs() < 1e-6 && (new[1] - 0.8).abs() < 1e-6, "{new:?}");
    let short = optimiser.stage(&[0.0; 2], &[-0.3, -0.4], 0.5, &mut new).unwrap();
    assert!(!short.clipped, "{short:?}");
    assert_eq!(new, [0.15, 0.2]);
}

#[test]
fn snapshots_share_and_old_buffers_are_used_again() {
    let settings = OptimiserSettings { momentum: 0.9, ..OptimiserSettings::default() };
    let mut optimiser = Optimiser::new(settings, dense(8), None).unwrap();
    let mut parameters = vec![0.0; 8];
    let address = |optimiser: &Optimiser| Arc::as_ptr(&optimiser.snapshot().buffers[0].1);
    let mut addresses = Vec::new();
    for _ in 0..4 {
        step(&mut optimiser, &mut parameters, &[1.0; 8], 1.0);
        addresses.push(address(&optimiser));
    }
    assert_eq!(addresses[0], addresses[2]);
    assert_eq!(addresses[1], addresses[3]);

    let held = optimiser.snapshot();
    assert_eq!(Arc::as_ptr(&held.buffers[0].1), address(&optimiser), "a snapshot copies nothing");
    for _ in 0..4 {
        step(&mut optimiser, &mut parameters, &[1.0; 8], 1.0);
        assert_ne!(Arc::as_ptr(&held.buffers[0].1), address(&optimiser));
    }
}

#[test]
fn a_foreign_state_is_refused_and_changes_nothing() {
    let settings = OptimiserSettings { momentum: 0.9, ..OptimiserSettings::default() };
    let mut optimiser = Optimiser::new(settings, dense(2), None).unwrap();
    step(&mut optimiser, &mut vec![0.0; 2], &[1.0; 2], 1.0);
    let before = copied(&optimiser.snapshot());
    let state = |buffers: &[(&str, Vec<f32>)]| OptimiserState {
        steps: 7,
        buffers: buffers
            .iter()
            .map(|(name, values)| ((*name).to_owned(), Arc::new(values.clone())))
            .collect(),
    };
    let good = ("momentum", vec![1.0, 2.0]);
    let momentum = || "momentum".to_owned();
    let exp_avg = || "exp_avg".to_owned();
    for (buffers, error) in [
        (vec![], MathError::MissingBuffer { name: momentum() }),
        (
            vec![good.clone(), ("exp_avg", vec![1.0, 2.0])],
            MathError::UnknownBuffer { name: exp_avg() },
        ),
        (vec![good.clone(), good.clone()], MathError::UnknownBuffer { name: momentum() }),
        (vec![("momentum", vec![1.0, f32::NAN])], MathError::BufferNotFinite { name: momentum() }),
    ] {
        assert_eq!(optimiser.restore(state(&buffers)), Err(error));
    }
    let short = optimiser.restore(state(&[("momentum", vec![1.0])]));
    assert!(matches!(short, Err(MathError::Length { expected: 2, found: 1, .. })));
    assert_eq!(copied(&optimiser.snapshot()), before);
    optimiser.restore(state(&[good])).unwrap();
    assert_eq!(optimiser.steps(), 7);
}

#[test]
fn wrong_buffers_and_settings_are_refused() {
    let mut optimiser = Optimiser::new(OptimiserSettings::default(), dense(3), None).unwrap();
    let values = [0.0; 4];
    for (old, gradient, new) in [(2, 3, 2), (3, 2, 3), (3, 3, 4), (4, 3, 3)] {
        let mut new = vec![0.0; new];
        let refused = optimiser.stage(&values[..old], &values[..gradient], 1.0, &mut new);
        assert!(matches!(refused, Err(MathError::Length { .. })), "{refused:?}");
    }
    assert!(optimiser.stage(&values, &values, 1.0, &mut [0.0; 4]).is_ok());

    let cosine = OptimiserSettings {
        schedule: Schedule::Cosine { steps: None, floor: 0.0, warm_up: 0 },
        ..OptimiserSettings::default()
    };
    let endless = Optimiser::new(cosine.clone(), dense(1), None).map(|_| ());
    assert!(matches!(endless, Err(MathError::Setting { field, .. }) if field == "schedule.steps"));
    assert!(Optimiser::new(cosine, dense(1), Some(10)).is_ok());
    let wrong = OptimiserSettings { rate: -1.0, ..OptimiserSettings::default() };
    assert!(Optimiser::new(wrong, dense(1), None).is_err());
}
