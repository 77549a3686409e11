//! `POST /predict`: a picture or a text in whatever way is at hand, an answer for people.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, header};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::version_header;
use crate::thread::{Question, highest};
use crate::{ApiError, Serving, body};

/// A text may have so many bytes.
const LONGEST_TEXT: usize = 20_000;

const FORMS: &str = "send JSON with one of `url`, `image` (base64) and `text`, a form with a file, \
                     or the bytes of a PNG or JPEG file";

/// A question in JSON: one of the three.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Asked {
    url: Option<String>,
    image: Option<String>,
    text: Option<String>,
}

#[derive(Debug, Serialize)]
struct Answer {
    answer: String,
    probabilities: Map<String, Value>,
    version: String,
    milliseconds: f64,
    /// The words of a text, with what each adds to the log-odds of the answer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    words: Vec<Word>,
}

#[derive(Debug, Serialize)]
struct Word {
    word: String,
    weight: f32,
}

pub(crate) async fn predict(
    State(serving): State<Arc<Serving>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let start = Instant::now();
    let loaded = serving.ready()?;
    let received = body::read(&headers, body, &serving).await?;
    let question = question(&serving, &headers, received.bytes.clone()).await?;
    let bytes = question.bytes();
    let verdict = serving.ask(&loaded, bytes, move |thread| thread.predict(&question)).await?;
    let (classes, shares) = (serving.model.classes(), verdict.shares);
    if shares.len() != classes.len() || shares.iter().any(|share| !share.is_finite()) {
        return Err(ApiError::internal(&"the model gave no probabilities"));
    }
    let answer = Answer {
        answer: classes[highest(&shares)].clone(),
        probabilities: classes.iter().cloned().zip(shares.iter().map(|&p| rounded(p))).collect(),
        version: loaded.version.clone(),
        milliseconds: (start.elapsed().as_secs_f64() * 1e5).round() / 100.0,
        words: verdict.words.into_iter().map(|(word, weight)| Word { word, weight }).collect(),
    };
    Ok((version_header(&loaded)?, Json(answer)).into_response())
}

/// Seven digits are all that an f32 has.
fn rounded(share: f32) -> Value {
    Value::from((f64::from(share) * 1e7).round() / 1e7)
}

async fn question(
    serving: &Serving,
    headers: &HeaderMap,
    bytes: Bytes,
) -> Result<Question, ApiError> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match essence.as_str() {
        "application/json" => from_json(serving, &bytes).await,
        "multipart/form-data" => from_form(kind, bytes).await,
        "text/plain" => match String::from_utf8(bytes.to_vec()) {
            Ok(text) => of_text(text),
            Err(_) => Err(ApiError::bad("the text is not UTF-8", "")),
        },
        // What is in the bytes counts, not what they are called; curl calls everything a form.
        _ if bytes.first() == Some(&b'{') => from_json(serving, &bytes).await,
        _ if bytes.is_empty() => Err(ApiError::bad("the request is empty", FORMS)),
        _ => Ok(Question::Picture(bytes)),
    }
}

async fn from_json(serving: &Serving, bytes: &[u8]) -> Result<Question, ApiError> {
    let asked: Asked = serde_json::from_slice(bytes)
        .map_err(|error| ApiError::bad(format!("the question cannot be read: {error}"), FORMS))?;
    match asked {
        Asked { url: Some(url), image: None, text: None } => {
            Ok(Question::Picture(serving.fetcher.fetch(&url).await?))
        }
        Asked { url: None, image: Some(image), text: None } => {
            // A data: address is what browsers and notebooks have at hand.
            let digits = image.split_once("base64,").map_or(image.as_str(), |(_, digits)| digits);
            let file = STANDARD.decode(digits.trim()).map_err(|error| {
                ApiError::bad(format!("`image` is not base64: {error}"), "base64 -w0 FILE makes it")
            })?;
            Ok(Question::Picture(Bytes::from(file)))
        }
        Asked { url: None, image: None, text: Some(text) } => of_text(text),
        _ => Err(ApiError::bad("the question needs one of `url`, `image` and `text`", FORMS)),
    }
}

fn of_text(text: String) -> Result<Question, ApiError> {
    if text.len() > LONGEST_TEXT {
        return Err(ApiError::too_large(
            format!("the text has more than {LONGEST_TEXT} bytes"),
            "send a part of it",
        ));
    }
    if text.trim().is_empty() {
        return Err(ApiError::bad("the text is empty", ""));
    }
    Ok(Question::Text(text))
}

/// The first part of a form that is called `text` or `image`, or is a file.
async fn from_form(kind: &str, bytes: Bytes) -> Result<Question, ApiError> {
    let broken = |error: multer::Error| {
        ApiError::bad(format!("the form cannot be read: {error}"), "curl -F image=@seven.png")
    };
    let boundary = multer::parse_boundary(kind).map_err(broken)?;
    let stream = futures::stream::once(async { Ok::<_, std::io::Error>(bytes) });
    let mut form = multer::Multipart::new(stream, boundary);
    while let Some(field) = form.next_field().await.map_err(broken)? {
        if field.name() == Some("text") {
            return of_text(field.text().await.map_err(broken)?);
        }
        if field.file_name().is_some() || field.name() == Some("image") {
            return Ok(Question::Picture(field.bytes().await.map_err(broken)?));
        }
    }
    Err(ApiError::bad("the form has no file", "curl -F image=@seven.png"))
}
