//! Keys: issue and revoke.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use http::{HeaderMap, StatusCode};
use skep_wire::{KeyIssued, KeyRequest};

use crate::routes::address::Path;
use crate::{ApiError, Hive, body};

/// Issues a key. This is the only time it is shown.
#[utoipa::path(post, path = "/v1/keys", request_body = KeyRequest,
    responses((status = 201, body = KeyIssued)))]
pub(crate) async fn create_key(
    State(hive): State<Arc<Hive>>,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<KeyIssued>), ApiError> {
    let request: KeyRequest = body::read_json(&headers, body, &hive).await?;
    if let Some(run) = &request.run {
        hive.run(run)?;
    }
    let issued = hive.access.issue(&hive.store, &request).await?;
    Ok((StatusCode::CREATED, Json(issued)))
}

/// Takes a key back.
#[utoipa::path(delete, path = "/v1/keys/{key}", params(("key" = String, Path, description = "Its id")),
    responses((status = 204), (status = 404, body = skep_wire::ErrorBody)))]
pub(crate) async fn revoke_key(
    State(hive): State<Arc<Hive>>,
    Path(key): Path<String>,
) -> Result<StatusCode, ApiError> {
    hive.access.revoke(&hive.store, &key).await?;
    Ok(StatusCode::NO_CONTENT)
}
