//! How a run goes, for those who look at it for long: few messages a second, however many versions
//! it makes, and of bounded size.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde::Deserialize;
use skep_wire::{History, Progress, RunView, WorkerView};

use crate::history::{brief, clock};
use crate::keeper::Command;
use crate::routes::address::{Path, Query};
use crate::routes::streams::sse;
use crate::run_handle::RunHandle;
use crate::{ApiError, Hive};

/// How often a stream sends the workers.
const BETWEEN_WORKERS: Duration = Duration::from_millis(950);
/// How often a stream of a run that has ended sends anything.
const BETWEEN_ENDED: Duration = Duration::from_secs(5);

/// How much of the history.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct HistoryQuery {
    /// At most so many points; neighbours become one.
    points: Option<usize>,
}

/// The run from its start: loss, rates, workers and measurements, in at most 1,000 points.
#[utoipa::path(get, path = "/v1/runs/{run}/history", params(("run" = String, Path), HistoryQuery),
    responses((status = 200, body = History), (status = 404, body = skep_wire::ErrorBody)))]
pub(crate) async fn get_history(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
    Query(query): Query<HistoryQuery>,
) -> Result<Json<History>, ApiError> {
    let most = query.points.unwrap_or(usize::MAX);
    Ok(Json(hive.run(&run)?.recorder.history(most)))
}

/// Whether to go on, and how often.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ProgressQuery {
    /// Go on with what is new, as server-sent events.
    follow: bool,
    /// Seconds between two of them: 0.5 unless said otherwise, 0.1 at least.
    every: Option<f64>,
    /// With `follow`, begin with the points after the version of this number; without it, with
    /// those that come.
    after: Option<u64>,
}

/// The run now: progress, workers, use, the latest events.
#[utoipa::path(get, path = "/v1/runs/{run}/progress", params(("run" = String, Path), ProgressQuery),
    responses((status = 200, body = Progress), (status = 404, body = skep_wire::ErrorBody)))]
pub(crate) async fn get_progress(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
    Query(query): Query<ProgressQuery>,
) -> Result<Response, ApiError> {
    let mut watch = Watch::new(hive.run(&run)?, query.after);
    let first = watch.look().await?;
    if !query.follow {
        return Ok(Json(first).into_response());
    }
    let seconds = query.every.filter(|every| every.is_finite()).unwrap_or(0.5);
    let mut ticks = tokio::time::interval(Duration::from_secs_f64(seconds.clamp(0.1, 60.0)));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // The first tick is at once, and its message is `first`.
    let rest =
        stream::unfold((watch, ticks, Some(first)), async |(mut watch, mut ticks, first)| {
            loop {
                ticks.tick().await;
                if let Some(first) = first {
                    return Some((first, (watch, ticks, None)));
                }
                // The stream ends with the keeper: the hive goes down, or the run is deleted.
                let progress = watch.look().await.ok()?;
                if watch.is_worth_sending(&progress) {
                    return Some((progress, (watch, ticks, None)));
                }
            }
        });
    Ok(sse(rest))
}

/// One reader's place in a run.
struct Watch {
    run: Arc<RunHandle>,
    /// The version up to which points were sent.
    number: u64,
    /// The time up to which measurements were sent.
    measured: u64,
    /// The last event that was sent.
    event: u64,
    workers_sent: Option<Instant>,
    sent: Instant,
    is_over: bool,
}

impl Watch {
    fn new(run: Arc<RunHandle>, after: Option<u64>) -> Self {
        let history = run.recorder.history(usize::MAX);
        let newest = history.points.last().map_or(0, |point| point.version.number);
        Self {
            run,
            number: after.unwrap_or(newest),
            measured: history.measured.last().map_or(0, |measured| measured.time),
            event: 0,
            workers_sent: None,
            sent: Instant::now(),
            is_over: false,
        }
    }

    async fn look(&mut self) -> Result<Progress, ApiError> {
        let view = self.run.ask(|reply| Command::View { reply }).await?;
        let (points, measured) = self.run.recorder.since(self.number, self.measured);
        self.number = points.last().map_or(self.number, |point| point.version.number);
        self.measured = measured.last().map_or(self.measured, |measured| measured.time);
        let events = self.run.events.since(self.event);
        self.event = events.last().map_or(self.event, |event| event.id);
        let (versions_per_second, usage) = self.run.recorder.pace(view.version.number);
        let with_workers = self.workers_sent.is_none_or(|at| at.elapsed() >= BETWEEN_WORKERS);
        if with_workers {
            self.workers_sent = Some(Instant::now());
        }
        let worker_count = view.workers.len();
        let RunView { workers, skipped, .. } = view;
        Ok(Progress {
            time: clock(),
            name: view.name,
            state: view.state,
            reason: view.reason,
            version: view.version,
            durable: view.durable,
            epoch: view.epoch,
            epoch_applied: view.epoch_applied,
            epoch_positions: view.epoch_positions,
            epochs: view.epochs,
            steps: view.steps,
            samples: view.samples,
            loss: view.loss,
            rate: brief(view.rate),
            versions_per_second,
            seconds: brief(view.seconds),
            seconds_left: view.seconds_left.map(brief),
            validation: view.validation,
            best: view.best,
            test: view.test,
            skipped: skipped.iter().map(|gap| gap.count).sum(),
            model: view.model,
            trouble: view.trouble,
            usage,
            worker_count,
            workers: with_workers.then(|| workers.into_iter().map(short).collect()),
            points,
            measured,
            events,
        })
    }

    /// Of a run that has ended, what is new, and a sign of life now and then.
    fn is_worth_sending(&mut self, progress: &Progress) -> bool {
        let ended = std::mem::replace(&mut self.is_over, progress.state.is_final());
        let news = !progress.events.is_empty() || !progress.points.is_empty();
        if ended && self.is_over && !news && self.sent.elapsed() < BETWEEN_ENDED {
            return false;
        }
        self.sent = Instant::now();
        true
    }
}

/// With short numbers: there may be hundreds of workers in a message.
fn short(worker: WorkerView) -> WorkerView {
    WorkerView {
        seen_seconds: brief(worker.seen_seconds),
        rate: brief(worker.rate),
        staleness: brief(worker.staleness),
        waiting: brief(worker.waiting),
        ..worker
    }
}
