//! A question in two halves, with the model's computing between them: so it can be computed for
//! several questions at once, while each is read and answered by itself.

use std::sync::Arc;

use skep_data::Table;

use crate::thread::Thread;
use crate::{ApiError, Loaded, Model};

/// What comes of the first half.
pub(crate) enum Step<T> {
    Answered(T),
    /// The scores of a batch are wanted, for the second half.
    Scores(Table, Finish<T>),
}

/// The second half: from scores, row by row, to an answer.
type Finish<T> = Box<dyn FnOnce(&Model, &[f32]) -> Result<T, ApiError>>;

/// A question that waits for its scores, whatever its answer is.
pub(crate) struct Scoring {
    pub(crate) batch: Table,
    pub(crate) finish: Sends,
}

/// The second half of any question: it sends the answer that scores, or their absence, lead to.
type Sends = Box<dyn FnOnce(&mut Thread, Result<Vec<f32>, ApiError>)>;

/// Finishes questions of one version. Those with batches of one form are computed together: see
/// `Compute::rows_at_once`, by which no answer shows with whom it came.
pub(crate) fn finish(thread: &mut Thread, loaded: &Arc<Loaded>, scorings: Vec<Scoring>) {
    let mut groups: Vec<(Table, Vec<Scoring>)> = Vec::new();
    for scoring in scorings {
        let joined = groups
            .iter_mut()
            .find_map(|(batch, members)| batch.append(&scoring.batch).ok().map(|()| members));
        match joined {
            Some(members) => members.push(scoring),
            None => groups.push((scoring.batch.clone(), vec![scoring])),
        }
    }
    for (batch, members) in groups {
        let Ok(scores) = thread.answer(loaded, |thread| thread.scores(&batch)) else {
            // One of them makes the model fail: by itself, so that it costs no other's answer.
            for Scoring { batch, finish } in members {
                let scores = thread.answer(loaded, |thread| thread.scores(&batch));
                finish(thread, scores);
            }
            continue;
        };
        let classes = scores.len() / batch.rows().max(1);
        let mut rest = &scores[..];
        for Scoring { batch, finish } in members {
            let (own, others) = rest.split_at(classes * batch.rows());
            finish(thread, Ok(own.to_vec()));
            rest = others;
        }
    }
}
