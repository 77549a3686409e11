//! Shards: the data itself, so that workers on other hosts need nothing but the hive.

use std::ops::Range;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use skep_data::DataError;
use skep_wire::{ErrorCode, ShardRef};

use crate::routes::address::Path;
use crate::{ApiError, Hive, body};

/// The largest shard that can be sent.
const MOST_BYTES: usize = 1 << 30;

/// A shard of a run, or a range of its bytes.
#[utoipa::path(get, path = "/v1/runs/{run}/shards/{shard}",
    params(("run" = String, Path), ("shard" = String, Path, description = "Its hash")),
    responses((status = 200, body = Vec<u8>), (status = 206, body = Vec<u8>),
        (status = 404, body = skep_wire::ErrorBody)))]
pub(crate) async fn get_shard(
    State(hive): State<Arc<Hive>>,
    Path((run, shard)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let handle = hive.run(&run)?;
    let known = handle.shards.get(&shard);
    let known = known.ok_or_else(|| ApiError::not_found("the run has no such shard"))?;
    if !known.is_kept() {
        return Err(ApiError::new(
            ErrorCode::NotFound,
            "the hive does not keep this shard",
            "only workers that have it can read it; name what a worker can read in `only`",
        ));
    }
    let explain = |error: DataError| ApiError::internal(&error);
    let mut response = match range(&headers, known.bytes)? {
        None => {
            let bytes = skep_data::get_shard(&hive.store, &shard).await.map_err(explain)?;
            handle.counters.sent_shard(bytes.len() as u64);
            Body::from(bytes).into_response()
        }
        Some(range) => {
            let bytes = skep_data::get_shard_range(&hive.store, &shard, range.clone())
                .await
                .map_err(explain)?;
            handle.counters.sent_shard(bytes.len() as u64);
            let mut response = (StatusCode::PARTIAL_CONTENT, Body::from(bytes)).into_response();
            let text = format!("bytes {}-{}/{}", range.start, range.end - 1, known.bytes);
            let value = HeaderValue::try_from(text).map_err(|error| ApiError::internal(&error))?;
            response.headers_mut().insert(header::CONTENT_RANGE, value);
            response
        }
    };
    let headers = response.headers_mut();
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/vnd.safetensors"));
    Ok(response)
}

/// The one range that a request asks for.
fn range(headers: &HeaderMap, size: u64) -> Result<Option<Range<u64>>, ApiError> {
    let Some(value) = headers.get(header::RANGE) else { return Ok(None) };
    let bad = || ApiError::bad(format!("Range must be `bytes=FROM-TO` within 0 to {size}"));
    let text = value.to_str().map_err(|_| bad())?;
    let (from, to) = text.strip_prefix("bytes=").and_then(|r| r.split_once('-')).ok_or_else(bad)?;
    let from: u64 = from.parse().map_err(|_| bad())?;
    let to: u64 = if to.is_empty() { size - 1 } else { to.parse().map_err(|_| bad())? };
    if from > to || from >= size {
        return Err(bad());
    }
    Ok(Some(from..to.min(size - 1) + 1))
}

/// Keeps a shard under the hash of its bytes.
#[utoipa::path(put, path = "/v1/shards/{shard}", params(("shard" = String, Path, description = "Its hash")),
    request_body(content = Vec<u8>, content_type = "application/vnd.safetensors"),
    responses((status = 204), (status = 400, body = skep_wire::ErrorBody)))]
pub(crate) async fn put_shard(
    State(hive): State<Arc<Hive>>,
    Path(shard): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, ApiError> {
    if !ShardRef::is_hash(&shard) {
        return Err(ApiError::bad("a shard's name is the SHA-256 of its bytes"));
    }
    let limit = MOST_BYTES.min(hive.byte_budget);
    let received = body::read(&headers, body, limit, &hive).await?;
    let bytes = Bytes::copy_from_slice(received.bytes());
    match hive.put_shard(&shard, bytes).await {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(error @ (DataError::Damaged { .. } | DataError::Path { .. })) => {
            Err(ApiError::new(ErrorCode::BadRequest, error.to_string(), "send it again"))
        }
        Err(error) => Err(ApiError::internal(&error)),
    }
}
