//! Reading a body: capped before memory is taken, and cut off when it comes too slowly.

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, header};
use http_body_util::{BodyExt, Limited};
use skep_wire::ErrorCode;
use tokio::sync::OwnedSemaphorePermit;

use crate::{ApiError, Serving};

/// A body in memory, with its share of the budget.
pub(crate) struct Received {
    pub(crate) bytes: Bytes,
    _spent: OwnedSemaphorePermit,
}

pub(crate) async fn read(
    headers: &HeaderMap,
    body: Body,
    serving: &Serving,
) -> Result<Received, ApiError> {
    let most = serving.settings.most_bytes;
    let too_large = || {
        ApiError::too_large(
            format!("the request has more than {most} bytes"),
            "send a smaller picture, or fewer rows at a time",
        )
    };
    let declared: Option<usize> = match headers.get(header::CONTENT_LENGTH) {
        None => None,
        Some(value) => {
            let length = value.to_str().ok().and_then(|text| text.parse().ok());
            Some(length.ok_or_else(|| ApiError::bad("Content-Length is not a number", ""))?)
        }
    };
    if declared.is_some_and(|length| length > most) {
        return Err(too_large());
    }
    let spent = serving.spend(declared.unwrap_or(most))?;
    let collected =
        tokio::time::timeout(serving.settings.patience, Limited::new(body, most).collect()).await;
    let collected = collected.map_err(|_| {
        ApiError::new(ErrorCode::TooSlow, "the body came too slowly", "try a better connection")
    })?;
    match collected {
        Ok(collected) => Ok(Received { bytes: collected.to_bytes(), _spent: spent }),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(too_large()),
        Err(error) => Err(ApiError::bad(format!("the body broke off: {error}"), "")),
    }
}
