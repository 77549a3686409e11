//! Parameters: one version, whole, as a safetensors file.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::Deserialize;
use skep_data::RunFiles;
use skep_wire::{Encoding, ErrorCode, Frame, Version, header as own};

use crate::metrics::Counters;
use crate::published::{Form, Snapshot};
use crate::routes::address::{Path, Query};
use crate::run_handle::RunHandle;
use crate::{ApiError, Hive};

/// What to answer with.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ParametersQuery {
    /// Seconds to wait for a version other than the one in `If-None-Match`, such as `30s`.
    wait: Option<String>,
    /// A version, such as `2.140`, or `best`, the one that did best on the validation split; the
    /// newest where it is left out. Others than the newest are there while their checkpoint is.
    version: Option<String>,
    /// `f32` or `bf16`.
    encoding: Option<String>,
    /// `frozen`: leave out the tensors that never change.
    without: Option<String>,
}

/// One version. The ETag is `generation.number.encoding`, with `.without-frozen` behind it where
/// frozen tensors are left out; `If-None-Match` gives 304.
#[utoipa::path(get, path = "/v1/runs/{run}/parameters", params(("run" = String, Path), ParametersQuery),
    responses((status = 200, description = "safetensors", content_type = "application/vnd.safetensors", body = Vec<u8>),
        (status = 304), (status = 404, body = skep_wire::ErrorBody)))]
pub(crate) async fn get_parameters(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
    Query(query): Query<ParametersQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let handle = hive.run(&run)?;
    let form = Form {
        encoding: query.encoding.as_deref().map_or(Ok(Encoding::F32), str::parse)?,
        without: query.without.as_deref().map(str::parse).transpose()?,
    };
    if let Some(text) = &query.version {
        let snapshot = if text == "best" {
            best(&hive, &handle).await?
        } else {
            let version: Version = text.parse()?;
            match handle.published.get(version) {
                Some(snapshot) => Some(snapshot),
                None => stored(&hive, &handle, version).await?,
            }
        };
        let snapshot = snapshot.ok_or_else(|| {
            let (what, hint) = if text == "best" {
                ("no version has been validated yet".to_owned(), "ask for the newest")
            } else {
                (
                    format!("version {text} is not kept any more"),
                    "ask for the newest, or for `best`",
                )
            };
            ApiError::new(ErrorCode::NotFound, what, hint)
        })?;
        return answer(&handle, &snapshot, form, &headers);
    }
    let wait = query.wait.as_deref().map(parse_wait).transpose()?.unwrap_or_default();
    let mut newest = handle.published.subscribe();
    let known = headers.get(header::IF_NONE_MATCH).cloned();
    let changed = newest.wait_for(|snapshot| {
        known.as_ref().is_none_or(|known| *known != etag(snapshot.version, form))
    });
    // A time-out leaves the newest, which is the known one: 304.
    let _ = tokio::time::timeout(wait, changed).await;
    let snapshot = handle.published.newest();
    answer(&handle, &snapshot, form, &headers)
}

/// The version that did best on the validation split. Its checkpoint is kept until there is a better
/// one, which may be while it is looked for.
async fn best(hive: &Hive, handle: &RunHandle) -> Result<Option<Arc<Snapshot>>, ApiError> {
    let files = RunFiles::new(hive.store.clone(), &handle.spec.name)
        .map_err(|error| ApiError::internal(&error))?;
    for _ in 0..3 {
        let hint = files.read_hint("best").await.map_err(|error| ApiError::internal(&error))?;
        let Some(version) = hint else { break };
        if let Some(snapshot) = stored(hive, handle, version).await? {
            return Ok(Some(snapshot));
        }
    }
    Ok(None)
}

/// A version from its checkpoint, if that is there.
async fn stored(
    hive: &Hive,
    handle: &RunHandle,
    version: Version,
) -> Result<Option<Arc<Snapshot>>, ApiError> {
    let files = RunFiles::new(hive.store.clone(), &handle.spec.name)
        .map_err(|error| ApiError::internal(&error))?;
    let bytes = match files.checkpoint_model(version).await {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Ok(None),
        Err(error) => return Err(ApiError::internal(&error)),
    };
    let layout = handle.published.newest().frame.layout().clone();
    let read = tokio::task::spawn_blocking(move || Frame::read(&layout, &bytes));
    let frame = read.await.map_err(|error| ApiError::internal(&error))?;
    let frame = frame.map_err(|error| ApiError::internal(&error))?;
    Ok(Some(handle.published.revived(version, Arc::new(frame))))
}

fn answer(
    handle: &RunHandle,
    snapshot: &Arc<Snapshot>,
    form: Form,
    headers: &HeaderMap,
) -> Result<Response, ApiError> {
    let tag = etag(snapshot.version, form);
    let version = HeaderValue::try_from(snapshot.version.to_string())
        .map_err(|error| ApiError::internal(&error))?;
    let mut response = if headers.get(header::IF_NONE_MATCH) == Some(&tag) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        let mut response = parameters_body(handle, snapshot, form)?.into_response();
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/vnd.safetensors"));
        response
    };
    response.headers_mut().insert(header::ETAG, tag);
    response.headers_mut().insert(own::VERSION, version);
    Ok(response)
}

/// The bytes of a version, shared with everyone who reads it.
pub(crate) fn parameters_body(
    handle: &RunHandle,
    snapshot: &Arc<Snapshot>,
    form: Form,
) -> Result<Body, ApiError> {
    if handle.published.crowded() {
        return Err(ApiError::new(
            ErrorCode::Busy,
            "slow readers hold too many old versions",
            "try again after the time in Retry-After",
        ));
    }
    let bytes = snapshot.bytes(form);
    Counters::add(&handle.counters.bytes_out, bytes.len() as u64);
    Ok(Body::from(bytes))
}

fn etag(version: Version, form: Form) -> HeaderValue {
    HeaderValue::try_from(format!("\"{}\"", form.tag(version)))
        .expect("versions and forms are visible ASCII")
}

fn parse_wait(text: &str) -> Result<Duration, ApiError> {
    let seconds: f64 = text
        .trim_end_matches('s')
        .parse()
        .ok()
        .filter(|seconds: &f64| !seconds.is_nan())
        .ok_or_else(|| ApiError::bad(format!("`wait={text}` is not a time such as `30s`")))?;
    Ok(Duration::from_secs_f64(seconds.clamp(0.0, 60.0)))
}
