//! Contributions: what workers bring home.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, header};
use skep_math::all_finite;
use skep_wire::{
    ContributionKind, Encoding, Envelope, ErrorCode, EvaluationCounts, Frame, MAX_HEADER_BYTES,
};

use crate::body::Received;
use crate::budget::Spent;
use crate::keeper::Command;
use crate::metrics::Counters;
use crate::published::Form;
use crate::routes::address::Path;
use crate::routes::parameters_body;
use crate::run_handle::RunHandle;
use crate::{ApiError, Hive, body};

/// Bodies from this size on are decoded off the async threads.
const LARGE: usize = 4 << 20;

/// Takes a contribution. Its envelope is in the headers `skep-*`; the body is a safetensors file
/// (gradients, models) or JSON (evaluations). The answer's headers say what became of it; its body has the
/// newest parameters if `skep-want` asks for them and `skep-have` is older, but for frozen tensors if
/// `skep-without` is `frozen`.
#[utoipa::path(post, path = "/v1/runs/{run}/contributions", params(("run" = String, Path),
        ("skep-lease" = String, Header), ("skep-sequence" = u64, Header),
        ("skep-first" = u64, Header), ("skep-count" = u64, Header), ("skep-base" = String, Header),
        ("skep-kind" = String, Header), ("skep-encoding" = Option<String>, Header),
        ("skep-loss" = Option<f64>, Header), ("skep-want" = Option<String>, Header),
        ("skep-have" = Option<String>, Header), ("skep-without" = Option<String>, Header)),
    request_body(content = Vec<u8>, content_type = "application/vnd.safetensors"),
    responses((status = 200, description = "Headers: skep-outcome, skep-version, skep-durable"),
        (status = 400, body = skep_wire::ErrorBody), (status = 409, body = skep_wire::ErrorBody),
        (status = 410, body = skep_wire::ErrorBody), (status = 503, body = skep_wire::ErrorBody)))]
pub(crate) async fn contribute(
    State(hive): State<Arc<Hive>>,
    Path(run): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let handle = hive.run(&run)?;
    let envelope = Envelope::read(&headers)?;
    let (want, have, without) = (envelope.want, envelope.have, envelope.without);
    let receipt = match envelope.kind {
        ContributionKind::Evaluation => {
            let counts: EvaluationCounts = body::read_json(&headers, body, &hive).await?;
            handle.ask(|reply| Command::Evaluate { envelope, counts, reply }).await??
        }
        kind => {
            let models = handle.spec.job.run.exchange == "models";
            if models != (kind == ContributionKind::Model) {
                let wanted = if models { "model" } else { "gradient" };
                return Err(ApiError::new(
                    ErrorCode::BadRequest,
                    format!("this run takes `skep-kind: {wanted}`"),
                    "`run.exchange` in the run's job says what workers bring home",
                ));
            }
            // Room for a header that someone else wrote; nothing of it is kept.
            let room = handle.gradient_layout.prefix().len() * 2 + 4096;
            let limit = handle.gradient_layout.data_bytes() + room.min(MAX_HEADER_BYTES);
            let received = body::read(&headers, body, limit, &hive).await?;
            Counters::add(&handle.counters.bytes_in, received.length as u64);
            let (frame, spent) = decode_checked(&handle, envelope.encoding, received).await?;
            handle.ask(|reply| Command::Contribute { envelope, frame, spent, reply }).await??
        }
    };
    let newest = handle.published.newest();
    let mut response = match want {
        Some(encoding) if have != Some(newest.version) => {
            let form = Form { encoding, without };
            let mut response = parameters_body(&handle, &newest, form)?.into_response();
            response.headers_mut().insert(
                header::CONTENT_TYPE,
                HeaderValue::from_static("application/vnd.safetensors"),
            );
            response
        }
        _ => ().into_response(),
    };
    let mut receipt = receipt;
    // What the body holds is what the header names, even if a version came out in between.
    receipt.version = newest.version;
    receipt.write(response.headers_mut());
    Ok(response)
}

async fn decode_checked(
    handle: &Arc<RunHandle>,
    encoding: Encoding,
    received: Received,
) -> Result<(Frame, Spent), ApiError> {
    if received.length < LARGE {
        return decode(handle, encoding, received);
    }
    let handle = handle.clone();
    tokio::task::spawn_blocking(move || decode(&handle, encoding, received))
        .await
        .map_err(|error| ApiError::internal(&error))?
}

fn decode(
    handle: &RunHandle,
    encoding: Encoding,
    received: Received,
) -> Result<(Frame, Spent), ApiError> {
    let Received { words, length, spent } = received;
    let layout = match encoding {
        Encoding::Bf16 => &handle.narrow_gradient_layout,
        _ => &handle.gradient_layout,
    };
    let frame = match Frame::adopt(layout, words, length) {
        Ok(frame) if encoding == Encoding::F32 => frame,
        Ok(narrow) => narrow.convert(&handle.gradient_layout)?,
        Err(words) => {
            let bytes: &[u8] = bytemuck::cast_slice(&words);
            Frame::read(&handle.gradient_layout, &bytes[..length])?
        }
    };
    if !all_finite(frame.floats()) {
        return Err(ApiError::new(
            ErrorCode::NotFinite,
            "the contribution has NaN or infinity in it",
            "give the lease back with the failure; lower the rate or clip if it happens often",
        ));
    }
    Ok((frame, spent))
}
