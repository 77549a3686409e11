//! The routes, one file per noun.

mod page;
mod predict;
mod protocol;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use http::{HeaderName, HeaderValue, Method, header};
use skep_wire::ErrorCode;

use crate::{ApiError, Loaded, Serving};

/// The whole server as a router, callable from tests.
pub fn app(serving: Arc<Serving>) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/model", get(page::model))
        .route("/predict", post(predict::predict))
        .route("/v2", get(protocol::server))
        .route("/v2/health/live", get(protocol::live))
        .route("/v2/health/ready", get(protocol::ready))
        .route("/v2/models/{model}", get(protocol::metadata))
        .route("/v2/models/{model}/ready", get(protocol::model_ready))
        .route("/v2/models/{model}/infer", post(protocol::infer))
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn(refuse_other_sites))
        .with_state(serving)
}

async fn nothing_here() -> ApiError {
    ApiError::new(
        ErrorCode::NotFound,
        "there is nothing at this address",
        "there are /, /predict and /v2",
    )
}

async fn wrong_method() -> ApiError {
    ApiError::bad("this address does not take that method", "questions are asked with POST")
}

/// A web page of another site must not ask through somebody's browser: it could use a server on
/// that person's own machine to look at addresses it cannot reach itself.
async fn refuse_other_sites(request: Request, next: Next) -> Result<Response, ApiError> {
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

/// Names the version that answered.
fn version_header(loaded: &Loaded) -> Result<[(HeaderName, HeaderValue); 1], ApiError> {
    let version = HeaderValue::try_from(loaded.version.as_str())
        .map_err(|error| ApiError::internal(&error))?;
    Ok([(HeaderName::from_static(skep_wire::header::VERSION), version)])
}
