//! Leases: take, renew, give back.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use http::{HeaderMap, StatusCode};
use skep_wire::{GiveBack, LeaseAnswer, LeaseId, LeaseRequest, Renewed};

use crate::keeper::Command;
use crate::routes::address::Path;
use crate::{ApiError, Hive, body};

/// Asks for work. One worker holds one lease: asking again gives the former one back.
#[utoipa::path(post, path = "/v1/runs/{run}/leases", params(("run" = String, Path)),
    request_body = LeaseRequest, responses((status = 200, body = LeaseAnswer)))]
pub(crate) async fn take_lease(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<LeaseAnswer>, ApiError> {
    let handle = hive.run(&run)?;
    let request: LeaseRequest = body::read_json(&headers, body, &hive).await?;
    let printable = !request.worker.is_empty()
        && request.worker.len() <= 128
        && request.worker.chars().all(|c| c.is_ascii_graphic());
    if !printable {
        return Err(ApiError::bad("a worker's name has 1 to 128 visible ASCII characters"));
    }
    let numbers = [request.seconds_left.unwrap_or(0.0), request.wait, request.waiting];
    if numbers.iter().any(|number| !number.is_finite() || *number < 0.0) {
        return Err(ApiError::bad("times must be 0 or more"));
    }
    Ok(Json(handle.ask(|reply| Command::Lease { request, reply }).await??))
}

/// A heartbeat.
#[utoipa::path(put, path = "/v1/runs/{run}/leases/{lease}",
    params(("run" = String, Path), ("lease" = String, Path)),
    responses((status = 200, body = Renewed), (status = 410, body = skep_wire::ErrorBody)))]
pub(crate) async fn renew_lease(
    State(hive): State<Arc<Hive>>,
    Path((run, lease)): Path<(String, String)>,
) -> Result<Json<Renewed>, ApiError> {
    let lease: LeaseId = lease.parse()?;
    let handle = hive.run(&run)?;
    let renew_seconds = handle.ask(|reply| Command::Renew { lease, reply }).await??;
    Ok(Json(Renewed { renew_seconds }))
}

/// Gives a lease back; with a reason where its slice could not be worked on.
#[utoipa::path(delete, path = "/v1/runs/{run}/leases/{lease}",
    params(("run" = String, Path), ("lease" = String, Path)),
    request_body(content = GiveBack, description = "Optional"),
    responses((status = 204), (status = 410, body = skep_wire::ErrorBody)))]
pub(crate) async fn give_back_lease(
    State(hive): State<Arc<Hive>>,
    Path((run, lease)): Path<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, ApiError> {
    let lease: LeaseId = lease.parse()?;
    let handle = hive.run(&run)?;
    let received = body::read(&headers, body, 64 << 10, &hive).await?;
    let failure = if received.length == 0 {
        None
    } else {
        let given: GiveBack = serde_json::from_slice(received.bytes())
            .map_err(|error| ApiError::bad(error.to_string()))?;
        // It goes into logs, where a line must stay a line.
        given.failure.map(|reason| reason.chars().filter(|c| !c.is_control()).collect())
    };
    handle.ask(|reply| Command::GiveBack { lease, failure, reply }).await??;
    Ok(StatusCode::NO_CONTENT)
}
