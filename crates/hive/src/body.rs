//! Reading a body: capped before memory is taken, into a buffer that numbers can be used in, and
//! cut off when it comes too slowly.

use axum::body::Body;
use http::{HeaderMap, header};
use http_body_util::BodyExt;
use skep_wire::ErrorCode;
use tokio::time::{Instant, timeout_at};

use crate::budget::Spent;
use crate::deadlines::time_for;
use crate::{ApiError, Hive};

/// A body in memory, aligned for every element type.
pub(crate) struct Received {
    pub(crate) words: Vec<u64>,
    pub(crate) length: usize,
    pub(crate) spent: Spent,
}

impl Received {
    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.length]
    }
}

/// Reads a body of at most `limit` bytes.
pub(crate) async fn read(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    hive: &Hive,
) -> Result<Received, ApiError> {
    let too_large = |size: u64| {
        ApiError::new(
            ErrorCode::TooLarge,
            format!("the body has {size} bytes or more; at most {limit} are taken here"),
            "check that the tensors are the run's",
        )
    };
    let declared = match headers.get(header::CONTENT_LENGTH) {
        None => None,
        Some(value) => {
            let length: Option<u64> = value.to_str().ok().and_then(|text| text.parse().ok());
            Some(length.ok_or_else(|| ApiError::bad("Content-Length is not a number"))?)
        }
    };
    if let Some(size) = declared
        && size > limit as u64
    {
        return Err(too_large(size));
    }
    let expected = declared.map_or(limit, |size| size as usize);
    let spent = hive.budget.spend(expected)?;
    let mut words: Vec<u64> = Vec::new();
    if declared.is_some() {
        words = vec![0; expected.div_ceil(8)];
    }
    let start = Instant::now();
    let silence = hive.deadlines.body;
    let mut body = body;
    let mut length = 0usize;
    loop {
        // What has come buys time, what is announced does not: else a trickle could hold its
        // share of the budget for hours.
        let deadline = (Instant::now() + silence).min(start + silence + time_for(length));
        let next = timeout_at(deadline, body.frame()).await.map_err(|_| {
            ApiError::new(
                ErrorCode::TooSlow,
                format!("the body stalled after {length} bytes"),
                "try again on a better connection",
            )
        })?;
        let Some(frame) = next else { break };
        let frame = frame.map_err(|error| ApiError::bad(format!("the body broke off: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        let end = length + data.len();
        if end > limit {
            return Err(too_large(end as u64));
        }
        if end > words.len() * 8 {
            words.resize((end.div_ceil(8)).max(words.len() * 2).min(limit.div_ceil(8)), 0);
        }
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[length..end].copy_from_slice(&data);
        length = end;
    }
    Ok(Received { words, length, spent })
}

/// Reads a small body whole.
pub(crate) async fn read_json<T: serde::de::DeserializeOwned>(
    headers: &HeaderMap,
    body: Body,
    hive: &Hive,
) -> Result<T, ApiError> {
    let received = read(headers, body, 1 << 20, hive).await?;
    serde_json::from_slice(received.bytes())
        .map_err(|error| ApiError::bad(format!("the body is not what this route takes: {error}")))
}
