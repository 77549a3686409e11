//! Several models that answer as one: an [`Ensemble`] computes, an [`EnsembleTask`] is what a
//! server asks. The parameters of all members are one frame, in which member 2's `conv1.weight` is
//! called `2.conv1.weight`.

use std::sync::Arc;

use skep_data::{Dataset, Table};
use skep_wire::{Encoding, EvaluationCounts, Frame, Job, Layout, Schema};

use crate::{Assets, Compute, Encoder, Inference, LearnError, Task, classify};

/// How an ensemble comes to an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vote {
    /// The mean of what the members hold likely.
    #[default]
    Mean,
    /// The class that most members would answer; of equally many, the likelier one.
    Majority,
}

/// Several models that answer as one. It only answers: members are trained one by one.
pub struct Ensemble {
    members: Vec<Box<dyn Compute>>,
    schema: Schema,
    vote: Vote,
}

impl Ensemble {
    /// Of at least one member.
    pub fn new(members: Vec<Box<dyn Compute>>, vote: Vote) -> Result<Self, LearnError> {
        if members.is_empty() {
            return Err(LearnError::Ensemble("it has no members".to_owned()));
        }
        let mut tensors = Vec::new();
        for (at, member) in members.iter().enumerate() {
            tensors.extend(member.schema().tensors().iter().cloned().map(|mut tensor| {
                tensor.name = name_of(at, &tensor.name);
                tensor
            }));
        }
        Ok(Self { members, schema: Schema::new(tensors)?, vote })
    }

    /// The parameters of all members as one frame, from those of each.
    pub fn join(&self, parameters: &[Frame]) -> Result<Frame, LearnError> {
        let layout = Layout::of_version(&self.schema, Encoding::F32)?;
        let mut joined = Frame::zeros(Arc::new(layout));
        for (at, frame) in parameters.iter().enumerate() {
            for place in frame.layout().places() {
                copy(frame, &place.name, &mut joined, &name_of(at, &place.name))?;
            }
        }
        Ok(joined)
    }

    /// How many members.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Never: there is at least one member.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The scores of each member, as [`Compute::infer`] gives them.
    pub fn infer_each(&mut self, batch: &Table) -> Result<Vec<Vec<f32>>, LearnError> {
        let scores: Vec<_> =
            self.members.iter_mut().map(|member| member.infer(batch)).collect::<Result<_, _>>()?;
        if let Some(other) = scores.iter().find(|other| other.len() != scores[0].len()) {
            let rows = batch.rows().max(1);
            return Err(LearnError::Ensemble(format!(
                "one member tells {} classes apart, another {}",
                scores[0].len() / rows,
                other.len() / rows
            )));
        }
        Ok(scores)
    }
}

/// What a member's tensor is called among those of all; people count from 1.
fn name_of(member: usize, tensor: &str) -> String {
    format!("{}.{tensor}", member + 1)
}

fn copy(from: &Frame, name: &str, into: &mut Frame, as_name: &str) -> Result<(), LearnError> {
    match (from.tensor(name), into.tensor_mut(as_name)) {
        (Some(from), Some(into)) if from.len() == into.len() => into.copy_from_slice(from),
        _ => return Err(LearnError::Ensemble(format!("`{name}` does not fit `{as_name}`"))),
    }
    Ok(())
}

/// The scores of all from the scores of each: logarithms of probabilities, so that a softmax gives
/// those back.
pub fn combine(scores: &[Vec<f32>], classes: usize, vote: Vote) -> Vec<f32> {
    let members = scores.len() as f64;
    let rows = scores.first().map_or(0, |scores| scores.len() / classes.max(1));
    let mut combined = Vec::with_capacity(rows * classes);
    for row in 0..rows {
        let mut mean = vec![0.0f64; classes];
        let mut votes = vec![0.0f64; classes];
        for scores in scores {
            let scores = &scores[row * classes..(row + 1) * classes];
            for (sum, probability) in mean.iter_mut().zip(classify::probabilities(scores)) {
                *sum += probability / members;
            }
            votes[classify::best(scores)] += 1.0;
        }
        let share = |class: usize| match vote {
            Vote::Mean => mean[class],
            // Half a vote for being likely: it decides between equals and nothing else.
            Vote::Majority => (votes[class] + mean[class] / 2.0) / (members + 0.5),
        };
        combined.extend((0..classes).map(|class| share(class).max(f64::MIN_POSITIVE).ln() as f32));
    }
    combined
}

impl Compute for Ensemble {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn initial(&self, _seed: u64) -> Result<Frame, LearnError> {
        Err(LearnError::Ensemble("its members are trained one by one".to_owned()))
    }

    fn load(&mut self, parameters: &Frame) -> Result<(), LearnError> {
        for (at, member) in self.members.iter_mut().enumerate() {
            let layout = Layout::of_version(member.schema(), Encoding::F32)?;
            let mut own = Frame::zeros(Arc::new(layout));
            for place in own.layout().clone().places() {
                copy(parameters, &name_of(at, &place.name), &mut own, &place.name)?;
            }
            member.load(&own)?;
        }
        Ok(())
    }

    fn gradient(&mut self, _: &Table, _: u64, _: &mut Frame) -> Result<f64, LearnError> {
        Err(LearnError::Ensemble("its members are trained one by one".to_owned()))
    }

    fn evaluate(&mut self, batch: &Table) -> Result<EvaluationCounts, LearnError> {
        let scores = self.infer(batch)?;
        let labels = classify::label_numbers(classify::column(batch, "label")?)?;
        Ok(classify::count(&scores, &labels))
    }

    fn infer(&mut self, batch: &Table) -> Result<Vec<f32>, LearnError> {
        let scores = self.infer_each(batch)?;
        let classes = scores[0].len() / batch.rows().max(1);
        Ok(combine(&scores, classes, self.vote))
    }

    fn rows_at_once(&self) -> Option<usize> {
        // None if any has none.
        self.members.iter().map(|member| member.rows_at_once()).min().flatten()
    }
}

/// Several models of one task, to be asked as one.
pub struct EnsembleTask {
    task: Arc<dyn Task>,
    members: usize,
    vote: Vote,
}

impl EnsembleTask {
    /// So many models of a task.
    pub fn new(task: Arc<dyn Task>, members: usize, vote: Vote) -> Self {
        Self { task, members, vote }
    }

    /// The members, without parameters.
    pub fn ensemble(&self, job: &Job) -> Result<Ensemble, LearnError> {
        let members =
            (0..self.members).map(|_| self.task.compute(job)).collect::<Result<_, _>>()?;
        Ensemble::new(members, self.vote)
    }
}

impl Task for EnsembleTask {
    fn name(&self) -> &str {
        self.task.name()
    }

    fn about(&self) -> &str {
        self.task.about()
    }

    fn defaults(&self) -> Job {
        self.task.defaults()
    }

    fn dataset(&self, job: &Job) -> Result<Dataset, LearnError> {
        self.task.dataset(job)
    }

    fn compute(&self, job: &Job) -> Result<Box<dyn Compute>, LearnError> {
        Ok(Box::new(self.ensemble(job)?))
    }

    fn inference(&self, job: &Job) -> Option<Inference> {
        self.task.inference(job)
    }

    fn assets(&self) -> &[&str] {
        self.task.assets()
    }

    fn encoder(&self, job: &Job, assets: &Assets) -> Result<Box<dyn Encoder>, LearnError> {
        self.task.encoder(job, assets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_of_probabilities_and_the_majority_of_answers() {
        // Two members lean to class 0, one is sure of class 1.
        let scores = vec![vec![0.2, 0.0], vec![0.2, 0.0], vec![0.0, 9.0]];
        let mean = combine(&scores, 2, Vote::Mean);
        assert!(mean[1] > mean[0], "{mean:?}");
        let lean = 1.0 / (1.0 + (-0.2f64).exp());
        let sure = 1.0 / (1.0 + 9.0f64.exp());
        let expected = ((2.0 * lean + sure) / 3.0).ln();
        assert!((f64::from(mean[0]) - expected).abs() < 1e-6, "{mean:?}");
        let majority = combine(&scores, 2, Vote::Majority);
        assert!(majority[0] > majority[1], "{majority:?}");
        let whole: f64 = majority.iter().map(|score| f64::from(*score).exp()).sum();
        assert!((whole - 1.0).abs() < 1e-6, "probabilities: {majority:?}");
    }

    #[test]
    fn between_equally_many_votes_the_likelier_class_wins() {
        let scores = vec![vec![3.0, 0.0], vec![0.0, 1.0]];
        let majority = combine(&scores, 2, Vote::Majority);
        assert!(majority[0] > majority[1], "{majority:?}");
    }

    #[test]
    fn one_member_answers_as_it_would_alone() {
        let alone = combine(&[vec![1.0, 2.0, -1.0]], 3, Vote::Mean);
        let shift = alone[0] - 1.0;
        assert!((alone[1] - 2.0 - shift).abs() < 1e-6 && (alone[2] + 1.0 - shift).abs() < 1e-6);
        assert!(Ensemble::new(Vec::new(), Vote::Mean).is_err());
    }
}
