//! The core of the Open Inference Protocol, version 2.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::HeaderMap;
use serde::Deserialize;
use serde_json::{Value, json};
use skep_wire::ErrorCode;

use super::version_header;
use crate::pool::{Question, softmax};
use crate::tensor::{self, Tensor};
use crate::{ApiError, Serving, body};

/// A request may have so many rows.
const MOST_ROWS: usize = 4096;

type Shared = State<Arc<Serving>>;

pub(crate) async fn server() -> Json<Value> {
    Json(json!({ "name": "skep", "version": env!("CARGO_PKG_VERSION"), "extensions": [] }))
}

/// The process lives.
pub(crate) async fn live() -> Json<Value> {
    Json(json!({ "live": true }))
}

/// A version is loaded.
pub(crate) async fn ready(State(serving): Shared) -> Result<Json<Value>, ApiError> {
    serving.ready()?;
    Ok(Json(json!({ "ready": true })))
}

pub(crate) async fn model_ready(
    State(serving): Shared,
    Path(model): Path<String>,
) -> Result<Json<Value>, ApiError> {
    known(&serving, &model)?;
    serving.ready()?;
    Ok(Json(json!({ "name": model, "ready": true })))
}

fn known(serving: &Serving, model: &str) -> Result<(), ApiError> {
    if serving.model.name == model {
        return Ok(());
    }
    let shown: String = model.chars().take(80).collect();
    Err(ApiError::new(
        ErrorCode::NotFound,
        format!("there is no model `{shown}`"),
        format!("`{}` is served here", serving.model.name),
    ))
}

/// What the model takes and gives.
pub(crate) async fn metadata(
    State(serving): Shared,
    Path(model): Path<String>,
) -> Result<Response, ApiError> {
    known(&serving, &model)?;
    let loaded = serving.ready()?;
    let (name, datatypes, row) = tensor::input_of(&serving.model);
    let shape: Vec<i64> = std::iter::once(-1).chain(row.iter().map(|&side| side as i64)).collect();
    let classes = &serving.model.inference.classes;
    let output =
        |name: &str| json!({ "name": name, "datatype": "FP32", "shape": [-1, classes.len()] });
    let answer = Json(json!({
        "name": model,
        "versions": [loaded.version],
        "platform": format!("skep_{}", serving.model.kind()),
        "inputs": [{ "name": name, "datatype": datatypes[0], "shape": shape }],
        "outputs": [output("probabilities"), output("logits")],
        "parameters": { "classes": classes, "datatypes": datatypes },
    }));
    Ok((version_header(&loaded)?, answer).into_response())
}

#[derive(Debug, Deserialize)]
struct Request {
    #[serde(default)]
    id: Option<String>,
    inputs: Vec<Tensor>,
    #[serde(default)]
    outputs: Option<Vec<Wanted>>,
}

#[derive(Debug, Deserialize)]
struct Wanted {
    name: String,
}

pub(crate) async fn infer(
    State(serving): Shared,
    Path(model): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    known(&serving, &model)?;
    let loaded = serving.ready()?;
    let received = body::read(&headers, body, &serving).await?;
    let request: Request = serde_json::from_slice(&received.bytes).map_err(|error| {
        ApiError::bad(
            format!("the request cannot be read: {error}"),
            "see the Open Inference Protocol, version 2, for its form",
        )
    })?;
    let wanted: Vec<String> = match request.outputs {
        Some(outputs) => outputs.into_iter().map(|output| output.name).collect(),
        None => vec!["probabilities".to_owned(), "logits".to_owned()],
    };
    if let Some(unknown) = wanted.iter().find(|name| *name != "probabilities" && *name != "logits")
    {
        return Err(ApiError::bad(
            format!("there is no output `{unknown}`"),
            "there are `probabilities` and `logits`",
        ));
    }
    let (batch, rows) = tensor::batch(&serving.model, request.inputs)?;
    if rows > MOST_ROWS {
        return Err(ApiError::too_large(
            format!("the request has {rows} rows"),
            format!("send at most {MOST_ROWS} at a time"),
        ));
    }
    let scores = serving.ask(Question::Batch(batch), &loaded).await?.logits;
    let classes = serving.model.inference.classes.len();
    if scores.len() != rows * classes {
        return Err(ApiError::internal(&"the model gave another number of scores"));
    }
    let outputs: Vec<Value> = wanted
        .iter()
        .map(|name| {
            let data: Vec<f32> = if name == "logits" {
                scores.clone()
            } else {
                scores.chunks_exact(classes.max(1)).flat_map(softmax).collect()
            };
            json!({ "name": name, "datatype": "FP32", "shape": [rows, classes], "data": data })
        })
        .collect();
    let mut answer = json!({
        "model_name": model,
        "model_version": loaded.version,
        "outputs": outputs,
    });
    if let Some(id) = request.id {
        answer["id"] = Value::from(id);
    }
    Ok((version_header(&loaded)?, Json(answer)).into_response())
}
