//! The optimiser: one step at a time over flat buffers, staged before it counts.
//!
//! A step writes new parameters and new state beside the old ones. Until [`Optimiser::commit`]
//! nothing has happened: a step whose result is not finite is dropped whole, and one that another
//! part of the model refuses costs nothing to take back. For the same reason a checkpoint copies
//! nothing: a state buffer is never written again once it is live, so a snapshot shares it. When
//! nobody holds an old buffer any more, it becomes the space for the next step.

use std::array;
use std::sync::Arc;

use crate::clip::{NormSum, coefficient};
use crate::error::{MathError, check_length};
use crate::finite::all_finite;
use crate::rule::{Block, Factors, MOST_BUFFERS, Rule, buffer_names};
use crate::segment::{Run, Segment, join};
use crate::settings::OptimiserSettings;

/// Values that go through the norm, the rule and the finite check together: up to nine streams of
/// this length fit into a first-level cache.
const BLOCK: usize = 1024;

/// A group's own numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
struct GroupRates {
    rate: f64,
    decay: f64,
}

/// An optimiser with its state.
#[derive(Debug)]
pub struct Optimiser {
    settings: OptimiserSettings,
    runs: Vec<Run<GroupRates>>,
    total_steps: Option<u64>,
    /// Trainable values, and so the length of every state buffer.
    length: usize,
    /// The least lengths of the flat buffers.
    parameter_end: usize,
    gradient_end: usize,
    names: [Option<&'static str>; MOST_BUFFERS],
    steps: u64,
    live: [Arc<Vec<f32>>; MOST_BUFFERS],
    /// Where the next step writes: the state before last, or nothing yet.
    spare: [Arc<Vec<f32>>; MOST_BUFFERS],
    staged: bool,
}

/// What a staged step came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// The learning rate of this step, for tensors without a rate of their own.
    pub rate: f64,
    /// The gradient's norm, scaled but not yet clipped.
    pub norm: f64,
    /// Whether the gradient was longer than `clip_norm`.
    pub clipped: bool,
    /// Whether the gradient, every new parameter and the whole new state are finite. If not, the
    /// step is already discarded.
    pub finite: bool,
}

/// An optimiser's state, for a checkpoint. The buffers are shared, not copied.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimiserState {
    /// Steps taken.
    pub steps: u64,
    /// State by name, each with one value per trainable parameter in the order of the segments.
    pub buffers: Vec<(String, Arc<Vec<f32>>)>,
}

impl Optimiser {
    /// An optimiser that has not taken a step. `total_steps` is the run's length where it is known.
    ///
    /// # Errors
    /// When a setting is wrong, when segments overlap, or when the schedule needs the run's length
    /// and there is none.
    pub fn new(
        settings: OptimiserSettings,
        segments: Vec<Segment>,
        total_steps: Option<u64>,
    ) -> Result<Self, MathError> {
        settings.validate()?;
        if settings.schedule.needs_total() && total_steps.is_none() {
            let allowed = "a number of steps, because the run has no fixed length";
            return Err(MathError::setting("schedule.steps", "left out", allowed));
        }
        let runs = join(&segments, |group| {
            let (rate, decay) = settings.resolve(group);
            GroupRates { rate, decay }
        })?;
        let length = runs.iter().map(|run| run.parameter.len()).sum();
        let names = buffer_names(&settings);
        Ok(Self {
            parameter_end: runs.iter().map(|run| run.parameter.end).max().unwrap_or(0),
            gradient_end: runs.iter().map(|run| run.gradient.end).max().unwrap_or(0),
            live: names.map(|name| Arc::new(vec![0.0; if name.is_some() { length } else { 0 }])),
            spare: Default::default(),
            staged: false,
            steps: 0,
            settings,
            runs,
            total_steps,
            length,
            names,
        })
    }

    /// The settings it was made with.
    #[must_use]
    pub fn settings(&self) -> &OptimiserSettings {
        &self.settings
    }

    /// How many values it trains, which is the length of each state buffer.
    #[must_use]
    pub fn trainable(&self) -> usize {
        self.length
    }

    /// Steps committed so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The squared norm of `gradient * scale` over what trains. The same gradient gives the same
    /// bits, however the model is cut into tensors and groups.
    ///
    /// # Panics
    /// When the gradient is shorter than the segments say.
    #[must_use]
    pub fn norm_squared(&self, gradient: &[f32], scale: f32) -> f64 {
        let mut norm = NormSum::default();
        for run in &self.runs {
            norm.push(&gradient[run.gradient.clone()], scale);
        }
        norm.finish()
    }

    /// Works out the next step: writes the trainable ranges of `new`, and the next state aside.
    /// `gradient * scale` is the gradient of the step. What was staged before is replaced.
    ///
    /// # Errors
    /// When a buffer is too short, or `old` and `new` differ in length; nothing is staged then.
    pub fn stage(
        &mut self,
        old: &[f32],
        gradient: &[f32],
        scale: f32,
        new: &mut [f32],
    ) -> Result<StepReport, MathError> {
        self.check_buffers(old, gradient, new)?;
        // Clipping needs the norm of all before the step of any; without it the norm is a
        // by-product of the one pass.
        let norm_squared =
            self.settings.clip_norm.is_some().then(|| self.norm_squared(gradient, scale));
        Ok(self.advance(old, gradient, scale, norm_squared, new))
    }

    /// Like [`Optimiser::stage`] for one part of a larger model: clips by the norm of the whole,
    /// which is the sum of every part's [`Optimiser::norm_squared`], and reports it.
    ///
    /// # Errors
    /// As [`Optimiser::stage`].
    pub fn stage_part(
        &mut self,
        old: &[f32],
        gradient: &[f32],
        scale: f32,
        norm_squared: f64,
        new: &mut [f32],
    ) -> Result<StepReport, MathError> {
        self.check_buffers(old, gradient, new)?;
        Ok(self.advance(old, gradient, scale, Some(norm_squared), new))
    }

    fn check_buffers(
        &mut self,
        old: &[f32],
        gradient: &[f32],
        new: &[f32],
    ) -> Result<(), MathError> {
        self.staged = false;
        check_length("the new parameters' buffer", old.len(), new.len())?;
        for (what, needed, found) in [
            ("the parameters' buffer", self.parameter_end, old.len()),
            ("the gradient", self.gradient_end, gradient.len()),
        ] {
            if found < needed {
                check_length(what, needed, found)?;
            }
        }
        Ok(())
    }

    /// The one pass over everything, once the lengths are known to be right.
    fn advance(
        &mut self,
        old: &[f32],
        gradient: &[f32],
        scale: f32,
        norm_squared: Option<f64>,
        new: &mut [f32],
    ) -> StepReport {
        self.make_room();
        let Self { settings, runs, steps, live, spare, names, .. } = self;
        let clip = match (settings.clip_norm, norm_squared) {
            (Some(limit), Some(norm_squared)) => coefficient(norm_squared.sqrt(), limit),
            _ => 1.0,
        };
        let factors = Factors { scale, clip: clip as f32 };
        let schedule = settings.schedule.factor(*steps, self.total_steps);
        let mut next = spare.each_mut().map(|buffer| {
            Arc::get_mut(buffer).expect("make_room leaves only buffers that nobody else holds")
        });
        let used = names.map(|name| name.is_some());

        let mut norm = NormSum::default();
        let mut finite = true;
        for run in runs.iter() {
            let GroupRates { rate, decay } = run.settings;
            let rule = Rule::new(settings, *steps, rate * schedule, decay);
            let old = &old[run.parameter.clone()];
            let gradient = &gradient[run.gradient.clone()];
            let new = &mut new[run.parameter.clone()];
            let blocks = old.chunks(BLOCK).zip(gradient.chunks(BLOCK)).zip(new.chunks_mut(BLOCK));
            for (index, ((old, gradient), new)) in blocks.enumerate() {
                let start = run.state + index * BLOCK;
                let place =
                    |place: usize| if used[place] { start..start + old.len() } else { 0..0 };
                if norm_squared.is_none() {
                    norm.push(gradient, scale);
                }
                let state = array::from_fn(|buffer| &live[buffer][place(buffer)]);
                let mut buffer = 0..MOST_BUFFERS;
                let written = next.each_mut().map(|values| {
                    &mut values[place(buffer.next().expect("as many as there are buffers"))]
                });
                rule.apply(factors, Block { old, gradient, new: &mut *new, state, next: written });
                finite &= all_finite(new);
                for (buffer, values) in next.iter().enumerate() {
                    finite &= all_finite(&values[place(buffer)]);
                }
            }
        }
        let norm = norm_squared.unwrap_or_else(|| norm.finish()).sqrt();
        finite &= norm.is_finite();
        self.staged = finite;
        StepReport { rate: self.settings.rate * schedule, norm, clipped: clip < 1.0, finite }
    }

    /// Makes every spare buffer one of the right length that nobody else holds.
    fn make_room(&mut self) {
        for (spare, live) in self.spare.iter_mut().zip(&self.live) {
            let usable = Arc::get_mut(spare).is_some_and(|values| values.len() == live.len());
            if !usable {
                *spare = Arc::new(vec![0.0; live.len()]);
            }
        }
    }

    /// Makes the staged step the present one.
    ///
    /// # Panics
    /// When nothing is staged: never staged, discarded, or not finite. A caller that publishes
    /// parameters without their state has lost the run, so this must not pass quietly.
    pub fn commit(&mut self) {
        assert!(self.staged, "a commit needs a step that was staged and is finite");
        std::mem::swap(&mut self.live, &mut self.spare);
        self.staged = false;
        self.steps += 1;
    }

    /// Drops the staged step, if there is one.
    pub fn discard(&mut self) {
        self.staged = false;
    }

    /// The present state, for a checkpoint. It shares the buffers and costs nothing; as long as it
    /// is kept, steps write elsewhere.
    #[must_use]
    pub fn snapshot(&self) -> OptimiserState {
        let named = self.names.iter().zip(&self.live);
        let buffers = named
            .filter_map(|(name, buffer)| name.map(|name| (name.to_owned(), Arc::clone(buffer))))
            .collect();
        OptimiserState { steps: self.steps, buffers }
    }

    /// Continues from a saved state. What was staged is dropped.
    ///
    /// # Errors
    /// When the buffers' names or lengths are not those of these settings, or a value is not
    /// finite; the present state is then kept.
    pub fn restore(&mut self, state: OptimiserState) -> Result<(), MathError> {
        let mut live: [Option<Arc<Vec<f32>>>; MOST_BUFFERS] = Default::default();
        for (name, buffer) in state.buffers {
            let place = self.names.iter().position(|known| *known == Some(name.as_str()));
            let Some(place) = place.filter(|&place| live[place].is_none()) else {
                return Err(MathError::UnknownBuffer { name });
            };
            check_length(&format!("the state's buffer `{name}`"), self.length, buffer.len())?;
            if !all_finite(&buffer) {
                return Err(MathError::BufferNotFinite { name });
            }
            live[place] = Some(buffer);
        }
        for (name, buffer) in self.names.iter().zip(&live) {
            if let (Some(name), None) = (name, buffer) {
                return Err(MathError::MissingBuffer { name: (*name).to_owned() });
            }
        }
        self.live = live.map(Option::unwrap_or_default);
        self.steps = state.steps;
        self.staged = false;
        Ok(())
    }
}
