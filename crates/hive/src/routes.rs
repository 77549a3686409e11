//! The routes: HTTP to commands and back, one file per noun.

mod address;
mod contributions;
mod keys;
mod leases;
mod page;
mod parameters;
mod probes;
mod progress;
mod runs;
mod shards;
mod streams;

use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post, put};
use http::{Method, header};
use skep_wire::ErrorCode;

use crate::{Access, ApiError, Hive};

pub(crate) use contributions::*;
pub(crate) use keys::*;
pub(crate) use leases::*;
pub(crate) use page::*;
pub(crate) use parameters::*;
pub(crate) use probes::*;
pub(crate) use progress::*;
pub(crate) use runs::*;
pub(crate) use shards::*;
pub(crate) use streams::*;

/// The whole server as a router, callable from tests.
pub fn app(hive: Arc<Hive>) -> Router {
    Router::new()
        .route("/", get(live_page))
        .route("/v1/runs", get(list_runs).post(create_run))
        .route("/v1/runs/{run}", get(show_run).patch(change_run).delete(delete_run))
        .route("/v1/runs/{run}/parameters", get(get_parameters))
        .route("/v1/runs/{run}/leases", post(take_lease))
        .route("/v1/runs/{run}/leases/{lease}", put(renew_lease).delete(give_back_lease))
        .route("/v1/runs/{run}/contributions", post(contribute))
        .route("/v1/runs/{run}/shards/{shard}", get(get_shard))
        .route("/v1/runs/{run}/events", get(follow_events))
        .route("/v1/runs/{run}/history", get(get_history))
        .route("/v1/runs/{run}/progress", get(get_progress))
        .route("/v1/runs/{run}/logs", get(get_logs).post(post_logs))
        .route("/v1/shards/{shard}", put(put_shard))
        .route("/v1/keys", post(create_key))
        .route("/v1/keys/{key}", axum::routing::delete(revoke_key))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi))
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(hive.clone(), check_access))
        .with_state(hive)
}

async fn nothing_here() -> ApiError {
    ApiError::new(ErrorCode::NotFound, "there is nothing at this address", "see /openapi.json")
}

async fn wrong_method() -> ApiError {
    ApiError::bad("this address does not take that method")
}

/// Nobody in without a key: every request passes here before it reaches a route.
async fn check_access(
    State(hive): State<Arc<Hive>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let path = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    if let Some(role) = Access::needed(request.method(), path) {
        let run = path
            .starts_with("/v1/runs/{run}")
            .then(|| request.uri().path().split('/').nth(3).unwrap_or_default().to_owned());
        hive.access.allow(request.headers(), role, run.as_deref())?;
    }
    // A web page of another site must not reach a hive through somebody's browser.
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    if !reads && let Some(origin) = request.headers().get(header::ORIGIN) {
        let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
        let origin = origin.to_str().ok().and_then(|text| text.split_once("://"));
        if host.is_none() || origin.map(|(_, rest)| rest) != host {
            return Err(ApiError::new(
                ErrorCode::Forbidden,
                "requests from pages of other sites are refused",
                "",
            ));
        }
    }
    Ok(next.run(request).await)
}
