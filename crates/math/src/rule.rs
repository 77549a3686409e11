//! The update rules, one straight loop each, in PyTorch's order of operations.
//!
//! A rule reads old values and writes new ones; it never changes what it reads. All scalars are
//! brought to `f32` once per step, as PyTorch does, so that the loops hold nothing but `f32`
//! arithmetic on slices of one length, which vectorises. Conditions in the loops are the same for
//! every value and are moved out by the compiler.

#![allow(clippy::needless_range_loop, reason = "up to nine slices advance together")]

use crate::schedule::power;
use crate::settings::{Kind, OptimiserSettings};

/// The most state buffers that any rule has.
pub(crate) const MOST_BUFFERS: usize = 3;

/// Names of the state buffers, each in its fixed place; a place that these settings do not use has
/// no name and an empty buffer.
pub(crate) fn buffer_names(settings: &OptimiserSettings) -> [Option<&'static str>; MOST_BUFFERS] {
    let momentum = (settings.momentum != 0.0).then_some("momentum");
    match settings.kind {
        Kind::Sgd => [momentum, None, None],
        Kind::Adam | Kind::AdamW => {
            [Some("exp_avg"), Some("exp_avg_sq"), settings.amsgrad.then_some("max_exp_avg_sq")]
        }
        Kind::RmsProp => [Some("square_avg"), settings.centred.then_some("grad_avg"), momentum],
    }
}

/// A stretch of values, small enough that all of it stays in the nearest cache.
pub(crate) struct Block<'a> {
    pub(crate) old: &'a [f32],
    pub(crate) gradient: &'a [f32],
    pub(crate) new: &'a mut [f32],
    pub(crate) state: [&'a [f32]; MOST_BUFFERS],
    pub(crate) next: [&'a mut [f32]; MOST_BUFFERS],
}

/// What a gradient is multiplied by before anything else: first the caller's scale, then the
/// clipping coefficient. They stay two factors because PyTorch rounds after each.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    pub(crate) scale: f32,
    pub(crate) clip: f32,
}

impl Factors {
    #[inline(always)]
    fn apply(self, gradient: f32) -> f32 {
        gradient * self.scale * self.clip
    }
}

/// One step's update rule with all of its numbers.
pub(crate) enum Rule {
    Sgd(Sgd),
    Adam(Adam),
    RmsProp(RmsProp),
}

impl Rule {
    /// The rule for the step after `steps` steps, with a group's rate of that step and its decay.
    pub(crate) fn new(settings: &OptimiserSettings, steps: u64, rate: f64, decay: f64) -> Self {
        match settings.kind {
            Kind::Sgd => Self::Sgd(Sgd {
                rate: rate as f32,
                decay: decay as f32,
                momentum: settings.momentum as f32,
                fresh: (1.0 - settings.dampening) as f32,
                nesterov: settings.nesterov,
                first: steps == 0,
            }),
            Kind::Adam | Kind::AdamW => {
                let [beta1, beta2] = settings.betas;
                let step = steps.saturating_add(1);
                let decoupled = settings.kind == Kind::AdamW;
                Self::Adam(Adam {
                    step_size: (rate / (1.0 - power(beta1, step))) as f32,
                    correction: (1.0 - power(beta2, step)).sqrt() as f32,
                    shrink: if decoupled { (1.0 - rate * decay) as f32 } else { 1.0 },
                    decay: if decoupled { 0.0 } else { decay as f32 },
                    keep: [beta1 as f32, beta2 as f32],
                    fresh: [(1.0 - beta1) as f32, (1.0 - beta2) as f32],
                    epsilon: settings.epsilon as f32,
                    amsgrad: settings.amsgrad,
                })
            }
            Kind::RmsProp => Self::RmsProp(RmsProp {
                rate: rate as f32,
                decay: decay as f32,
                momentum: settings.momentum as f32,
                keep: settings.alpha as f32,
                fresh: (1.0 - settings.alpha) as f32,
                epsilon: settings.epsilon as f32,
                centred: settings.centred,
            }),
        }
    }

    /// Writes the block's next values.
    pub(crate) fn apply(&self, factors: Factors, block: Block<'_>) {
        match self {
            Self::Sgd(rule) if rule.momentum == 0.0 => rule.apply_plain(factors, block),
            Self::Sgd(rule) => rule.apply_with_momentum(factors, block),
            Self::Adam(rule) if rule.amsgrad => rule.apply_with_maximum(factors, block),
            Self::Adam(rule) => rule.apply(factors, block),
            Self::RmsProp(rule) => rule.apply(factors, block),
        }
    }
}

/// PyTorch adds a decay only where there is one; adding 0 could turn -0 into 0.
#[inline(always)]
fn decayed(gradient: f32, decay: f32, parameter: f32) -> f32 {
    if decay == 0.0 { gradient } else { gradient + decay * parameter }
}

pub(crate) struct Sgd {
    rate: f32,
    decay: f32,
    momentum: f32,
    fresh: f32,
    nesterov: bool,
    /// The first step's momentum is the gradient itself, without dampening.
    first: bool,
}

impl Sgd {
    fn apply_plain(&self, factors: Factors, block: Block<'_>) {
        let length = block.new.len();
        let (old, gradient) = (&block.old[..length], &block.gradient[..length]);
        let new = block.new;
        let Self { rate, decay, .. } = *self;
        for i in 0..length {
            new[i] = old[i] - rate * decayed(factors.apply(gradient[i]), decay, old[i]);
        }
    }

    fn apply_with_momentum(&self, factors: Factors, block: Block<'_>) {
        let length = block.new.len();
        let (old, gradient) = (&block.old[..length], &block.gradient[..length]);
        let new = block.new;
        let ([momentum_old, ..], [momentum_new, ..]) = (block.state, block.next);
        let (momentum_old, momentum_new) = (&momentum_old[..length], &mut momentum_new[..length]);
        let Self { rate, decay, momentum, fresh, nesterov, first } = *self;
        for i in 0..length {
            let change = decayed(factors.apply(gradient[i]), decay, old[i]);
            let moving = if first { change } else { momentum_old[i] * momentum + fresh * change };
            momentum_new[i] = moving;
            new[i] = old[i] - rate * if nesterov { change + momentum * moving } else { moving };
        }
    }
}

pub(crate) struct Adam {
    /// The rate with the first average's bias corrected.
    step_size: f32,
    /// The square root of the second average's bias.
    correction: f32,
    /// What decoupled decay leaves of the weights; 1 for plain Adam.
    shrink: f32,
    decay: f32,
    keep: [f32; 2],
    fresh: [f32; 2],
    epsilon: f32,
    amsgrad: bool,
}

impl Adam {
    fn apply(&self, factors: Factors, block: Block<'_>) {
        let length = block.new.len();
        let (old, gradient) = (&block.old[..length], &block.gradient[..length]);
        let new = block.new;
        let ([mean_old, square_old, _], [mean_new, square_new, _]) = (block.state, block.next);
        let (mean_old, mean_new) = (&mean_old[..length], &mut mean_new[..length]);
        let (square_old, square_new) = (&square_old[..length], &mut square_new[..length]);
        for i in 0..length {
            let change = decayed(factors.apply(gradient[i]), self.decay, old[i]);
            let (mean, square) = self.averages(change, mean_old[i], square_old[i]);
            mean_new[i] = mean;
            square_new[i] = square;
            new[i] = self.moved(old[i], mean, square);
        }
    }

    fn apply_with_maximum(&self, factors: Factors, block: Block<'_>) {
        let length = block.new.len();
        let (old, gradient) = (&block.old[..length], &block.gradient[..length]);
        let new = block.new;
        let [mean_old, square_old, most_old] = block.state;
        let [mean_new, square_new, most_new] = block.next;
        let (mean_old, mean_new) = (&mean_old[..length], &mut mean_new[..length]);
        let (square_old, square_new) = (&square_old[..length], &mut square_new[..length]);
        let (most_old, most_new) = (&most_old[..length], &mut most_new[..length]);
        for i in 0..length {
            let change = decayed(factors.apply(gradient[i]), self.decay, old[i]);
            let (mean, square) = self.averages(change, mean_old[i], square_old[i]);
            let most = if square > most_old[i] { square } else { most_old[i] };
            mean_new[i] = mean;
            square_new[i] = square;
            most_new[i] = most;
            new[i] = self.moved(old[i], mean, most);
        }
    }

    #[inline(always)]
    fn averages(&self, change: f32, mean: f32, square: f32) -> (f32, f32) {
        let mean = mean * self.keep[0] + self.fresh[0] * change;
        let square = square * self.keep[1] + self.fresh[1] * change * change;
        (mean, square)
    }

    #[inline(always)]
    fn moved(&self, parameter: f32, mean: f32, square: f32) -> f32 {
        let divisor = square.sqrt() / self.correction + self.epsilon;
        parameter * self.shrink - self.step_size * mean / divisor
    }
}

pub(crate) struct RmsProp {
    rate: f32,
    decay: f32,
    momentum: f32,
    keep: f32,
    fresh: f32,
    epsilon: f32,
    centred: bool,
}

impl RmsProp {
    /// Short loops of few slices, one after the other: the variants share them, and the block stays
    /// in the cache. `new` holds the gradient first, then the step, then the new parameters.
    fn apply(&self, factors: Factors, block: Block<'_>) {
        let length = block.new.len();
        let (old, gradient) = (&block.old[..length], &block.gradient[..length]);
        let new = block.new;
        let [square_old, mean_old, momentum_old] = block.state;
        let [square_new, mean_new, momentum_new] = block.next;
        let Self { rate, decay, momentum, .. } = *self;
        for i in 0..length {
            new[i] = decayed(factors.apply(gradient[i]), decay, old[i]);
        }
        let square_new = &mut square_new[..length];
        self.average_squares(&square_old[..length], new, square_new);
        // Without momentum PyTorch multiplies by the rate before it divides.
        let factor = if momentum == 0.0 { rate } else { 1.0 };
        if self.centred {
            let mean_new = &mut mean_new[..length];
            self.average(&mean_old[..length], new, mean_new);
            self.divide_centred(factor, square_new, mean_new, new);
        } else {
            self.divide(factor, square_new, new);
        }
        if momentum == 0.0 {
            for i in 0..length {
                new[i] = old[i] - new[i];
            }
        } else {
            let momentum_old = &momentum_old[..length];
            let momentum_new = &mut momentum_new[..length];
            for i in 0..length {
                let moving = momentum_old[i] * momentum + new[i];
                momentum_new[i] = moving;
                new[i] = old[i] - rate * moving;
            }
        }
    }

    fn average(&self, before: &[f32], changes: &[f32], after: &mut [f32]) {
        for ((after, before), change) in after.iter_mut().zip(before).zip(changes) {
            *after = before * self.keep + self.fresh * change;
        }
    }

    fn average_squares(&self, before: &[f32], changes: &[f32], after: &mut [f32]) {
        for ((after, before), change) in after.iter_mut().zip(before).zip(changes) {
            *after = before * self.keep + self.fresh * change * change;
        }
    }

    fn divide(&self, factor: f32, squares: &[f32], changes: &mut [f32]) {
        for (change, square) in changes.iter_mut().zip(squares) {
            *change = factor * *change / (square.sqrt() + self.epsilon);
        }
    }

    fn divide_centred(&self, factor: f32, squares: &[f32], means: &[f32], changes: &mut [f32]) {
        for ((change, square), mean) in changes.iter_mut().zip(squares).zip(means) {
            // A variance cannot be negative, but its rounding can; PyTorch has NaN there, and a run
            // that cannot get past this step is no use to anyone.
            let variance = square - mean * mean;
            let variance = if variance < 0.0 { 0.0 } else { variance };
            *change = factor * *change / (variance.sqrt() + self.epsilon);
        }
    }
}
