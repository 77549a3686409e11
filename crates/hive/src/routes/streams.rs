//! What happens, as it happens: events and workers' logs as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::sse::{Event as SentEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt, stream};
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use skep_wire::{Event, LogLine};
use tokio_stream::wrappers::BroadcastStream;

use crate::keeper::Command;
use crate::routes::address::{Path, Query};
use crate::{ApiError, Hive, body};

/// Versions, losses, workers and faults as they happen; the run's state first.
#[utoipa::path(get, path = "/v1/runs/{run}/events", params(("run" = String, Path)),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream", body = Event)))]
pub(crate) async fn follow_events(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
) -> Result<Response, ApiError> {
    let handle = hive.run(&run)?;
    let events = BroadcastStream::new(handle.events.subscribe());
    let view = handle.ask(|reply| Command::View { reply }).await?;
    let first = Event::State { state: view.state, reason: view.reason };
    // A reader that is too slow misses events; it sees that from the versions.
    let rest = events.filter_map(|event| async { event.ok() });
    Ok(sse(stream::iter([first]).chain(rest)))
}

/// Whether to go on with lines as they come.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LogsQuery {
    /// Go on with lines as they come, as server-sent events.
    follow: bool,
}

/// What the run's workers said.
#[utoipa::path(get, path = "/v1/runs/{run}/logs", params(("run" = String, Path), LogsQuery),
    responses((status = 200, body = Vec<LogLine>)))]
pub(crate) async fn get_logs(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
    Query(query): Query<LogsQuery>,
) -> Result<Response, ApiError> {
    let (kept, more) = hive.run(&run)?.events.lines();
    if !query.follow {
        return Ok(Json(kept).into_response());
    }
    let more = BroadcastStream::new(more).filter_map(|line| async { line.ok() });
    Ok(sse(stream::iter(kept).chain(more)))
}

/// Takes lines of a worker's log.
#[utoipa::path(post, path = "/v1/runs/{run}/logs", params(("run" = String, Path)),
    request_body = Vec<LogLine>, responses((status = 204)))]
pub(crate) async fn post_logs(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, ApiError> {
    let handle = hive.run(&run)?;
    let lines: Vec<LogLine> = body::read_json(&headers, body, &hive).await?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_millis() as u64);
    for mut line in lines.into_iter().take(1000) {
        line.time = now;
        line.message.retain(|c| !c.is_control());
        if !matches!(line.level.as_str(), "info" | "warn" | "error") {
            line.level = "info".to_owned();
        }
        line.worker = line.worker.chars().filter(char::is_ascii_graphic).take(128).collect();
        handle.events.log(line);
    }
    Ok(StatusCode::NO_CONTENT)
}

pub(super) fn sse<T: Serialize>(items: impl Stream<Item = T> + Send + 'static) -> Response {
    let events = items.map(|item| {
        let event = SentEvent::default().json_data(item).unwrap_or_default();
        Ok::<_, Infallible>(event)
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(10))).into_response()
}
