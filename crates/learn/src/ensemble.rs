//! Several models that answer as one.

use skep_data::Table;
use skep_wire::{EvaluationCounts, Frame, Schema};

use crate::{Compute, LearnError, classify};

/// How an ensemble comes to an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vote {
    /// The mean of what the members hold likely.
    #[default]
    Mean,
    /// The class that most members would answer; of equally many, the likelier one.
    Majority,
}

/// Several models, loaded with their parameters, that answer as one. It only answers: members are
/// trained one by one.
pub struct Ensemble {
    members: Vec<Box<dyn Compute>>,
    vote: Vote,
}

impl Ensemble {
    /// Of at least one member.
    pub fn new(members: Vec<Box<dyn Compute>>, vote: Vote) -> Result<Self, LearnError> {
        if members.is_empty() {
            return Err(LearnError::Ensemble("it has no members".to_owned()));
        }
        Ok(Self { members, vote })
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
        self.members[0].schema()
    }

    fn initial(&self, _seed: u64) -> Result<Frame, LearnError> {
        Err(LearnError::Ensemble("its members are trained one by one".to_owned()))
    }

    fn load(&mut self, _parameters: &Frame) -> Result<(), LearnError> {
        Err(LearnError::Ensemble("its members were loaded before".to_owned()))
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
