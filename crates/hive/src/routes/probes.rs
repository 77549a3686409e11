//! Probes, metrics and the description of the interface.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header;

use crate::keeper::Command;
use crate::{ApiError, Hive};

/// The process lives.
#[utoipa::path(get, path = "/healthz", responses((status = 200, description = "The process lives")))]
pub(crate) async fn healthz() -> &'static str {
    "ok\n"
}

/// The hive can be worked with: its store answers.
#[utoipa::path(get, path = "/readyz", responses(
    (status = 200, description = "The store answers"),
    (status = 500, description = "It does not", body = skep_wire::ErrorBody)))]
pub(crate) async fn readyz(State(hive): State<Arc<Hive>>) -> Result<&'static str, ApiError> {
    hive.store.list("generations").await.map_err(|error| ApiError::internal(&error))?;
    Ok("ready\n")
}

/// Counts and gauges in Prometheus' text form.
#[utoipa::path(get, path = "/metrics", responses((status = 200, description = "Prometheus text")))]
pub(crate) async fn metrics(State(hive): State<Arc<Hive>>) -> Result<Response, ApiError> {
    let handles = hive.handles();
    let mut runs = Vec::with_capacity(handles.len());
    for handle in &handles {
        let view = handle.ask(|reply| Command::View { reply }).await?;
        runs.push((view, handle.counters.as_ref()));
    }
    let page = crate::metrics::page(hive.generation, &runs);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], page).into_response())
}

/// This interface in OpenAPI's terms.
#[utoipa::path(get, path = "/openapi.json", responses((status = 200, description = "OpenAPI 3")))]
pub(crate) async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(crate::openapi::document())
}
