//! Runs: create, list, show, change, delete.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use http::{HeaderMap, StatusCode};
use skep_wire::{FrameView, RUN_METADATA, RunChange, RunSpec, RunSummary, RunView};

use crate::keeper::Command;
use crate::routes::address::Path;
use crate::{ApiError, Hive, body};

/// All runs.
#[utoipa::path(get, path = "/v1/runs", responses((status = 200, body = Vec<RunSummary>)))]
pub(crate) async fn list_runs(
    State(hive): State<Arc<Hive>>,
) -> Result<Json<Vec<RunSummary>>, ApiError> {
    let mut runs = Vec::new();
    for handle in hive.handles() {
        let view = handle.ask(|reply| Command::View { reply }).await?;
        runs.push(RunSummary {
            name: view.name,
            state: view.state,
            reason: view.reason,
            version: view.version,
            epoch: view.epoch,
            samples: view.samples,
            loss: view.loss,
            accuracy: view.best.and_then(|best| best.accuracy),
            workers: view.workers.len(),
            rate: view.rate,
        });
    }
    Ok(Json(runs))
}

/// Creates a run. The body is a safetensors file: its tensors are version 0, and its metadata has
/// the run's description as JSON under `skep.run`.
#[utoipa::path(post, path = "/v1/runs",
    request_body(content = Vec<u8>, content_type = "application/vnd.safetensors",
        description = "Version 0, with a `RunSpec` as JSON in the metadata under `skep.run`"),
    responses((status = 201, body = RunView), (status = 400, body = skep_wire::ErrorBody),
        (status = 409, body = skep_wire::ErrorBody)))]
pub(crate) async fn create_run(
    State(hive): State<Arc<Hive>>,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<RunView>), ApiError> {
    let received = body::read(&headers, body, hive.byte_budget, &hive).await?;
    let view = FrameView::parse(received.bytes())?;
    let text = view
        .metadata
        .get(RUN_METADATA)
        .ok_or_else(|| ApiError::bad(format!("the metadata has no `{RUN_METADATA}`")))?;
    let spec = RunSpec::from_metadata(text)?;
    let name = spec.name.clone();
    hive.create(spec, received.bytes()).await?;
    let view = hive.run(&name)?.ask(|reply| Command::View { reply }).await?;
    Ok((StatusCode::CREATED, Json(view)))
}

/// One run: the one authority on its settings.
#[utoipa::path(get, path = "/v1/runs/{run}", params(("run" = String, Path)),
    responses((status = 200, body = RunView), (status = 404, body = skep_wire::ErrorBody)))]
pub(crate) async fn show_run(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
) -> Result<Json<RunView>, ApiError> {
    let view = hive.run(&run)?.ask(|reply| Command::View { reply }).await?;
    Ok(Json(view))
}

/// Pauses, resumes or stops a run.
#[utoipa::path(patch, path = "/v1/runs/{run}", params(("run" = String, Path)),
    request_body = RunChange,
    responses((status = 200, body = RunView), (status = 409, body = skep_wire::ErrorBody)))]
pub(crate) async fn change_run(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<RunView>, ApiError> {
    let handle = hive.run(&run)?;
    let change: RunChange = body::read_json(&headers, body, &hive).await?;
    handle.ask(|reply| Command::Change { action: change.action, reply }).await??;
    Ok(Json(handle.ask(|reply| Command::View { reply }).await?))
}

/// Deletes a run with its checkpoints. Shards stay: other runs may use them.
#[utoipa::path(delete, path = "/v1/runs/{run}", params(("run" = String, Path)),
    responses((status = 204), (status = 404, body = skep_wire::ErrorBody)))]
pub(crate) async fn delete_run(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
) -> Result<StatusCode, ApiError> {
    hive.delete(&run).await?;
    Ok(StatusCode::NO_CONTENT)
}
