//! The core of the Open Inference Protocol, version 2.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, header};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use skep_wire::ErrorCode;

use super::version_header;
use crate::model::Engine;
use crate::tensor::{self, Given, Tensor, TensorSpec};
use crate::{ApiError, Model, Serving, body};

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
    let served = &serving.model;
    let datatypes = |spec: &TensorSpec| -> Vec<&str> {
        spec.datatypes.iter().map(|datatype| datatype.as_str()).collect()
    };
    let platform = match served.kind() {
        "onnx" => "onnx_tract".to_owned(),
        kind => format!("skep_{kind}"),
    };
    let answer = Json(json!({
        "name": model,
        "versions": [loaded.version],
        "platform": platform,
        "inputs": served.inputs,
        "outputs": served.outputs,
        "parameters": {
            "classes": served.classes(),
            "datatypes": served.inputs.first().map(datatypes),
        },
    }));
    Ok((version_header(&loaded)?, answer).into_response())
}

#[derive(Debug, Deserialize)]
struct Request<'json> {
    #[serde(default)]
    id: Option<String>,
    #[serde(borrow)]
    inputs: Vec<Given<'json>>,
    #[serde(default)]
    outputs: Option<Vec<Wanted>>,
}

#[derive(Debug, Deserialize)]
struct Wanted {
    name: String,
}

#[derive(Debug, Serialize)]
struct Answer<'answer> {
    model_name: &'answer str,
    model_version: &'answer str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'answer str>,
    outputs: Vec<&'answer Tensor>,
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
    let (bytes, version) = (received.bytes.len(), loaded.version.clone());
    let answered = serving.ask(&loaded, bytes, move |thread| {
        let (inputs, asked) = read(thread.model(), &received.bytes)?;
        thread.infer(inputs, move |model, outputs| {
            let _kept = received;
            asked.answer(model, &version, outputs)
        })
    });
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((version_header(&loaded)?, json, answered.await?).into_response())
}

/// What of a request its answer depends on, besides its tensors.
struct Asked {
    id: Option<String>,
    /// Names of outputs.
    wanted: Vec<String>,
}

impl Asked {
    fn answer(
        &self,
        model: &Model,
        version: &str,
        outputs: &[Tensor],
    ) -> Result<Vec<u8>, ApiError> {
        let named = |name: &String| outputs.iter().find(|output| output.name == *name);
        let answer = Answer {
            model_name: &model.name,
            model_version: version,
            id: self.id.as_deref(),
            outputs: self.wanted.iter().filter_map(named).collect(),
        };
        serde_json::to_vec(&answer).map_err(|error| ApiError::internal(&error))
    }
}

/// From the bytes of a request to its tensors, on a thread that computes.
fn read(model: &Model, request: &[u8]) -> Result<(Vec<Tensor>, Asked), ApiError> {
    let request: Request<'_> = serde_json::from_slice(request).map_err(|error| {
        ApiError::bad(
            format!("the request cannot be read: {error}"),
            "see the Open Inference Protocol, version 2, for its form",
        )
    })?;
    let known: Vec<&str> = model.outputs.iter().map(|output| output.name.as_str()).collect();
    let wanted: Vec<String> = match request.outputs {
        Some(outputs) => outputs.into_iter().map(|output| output.name).collect(),
        None => known.iter().map(|&name| name.to_owned()).collect(),
    };
    if let Some(unknown) = wanted.iter().find(|name| !known.contains(&name.as_str())) {
        let unknown: String = unknown.chars().take(80).collect();
        return Err(ApiError::bad(
            format!("there is no output `{unknown}`"),
            format!("there are `{}`", known.join("`, `")),
        ));
    }
    let is_graph = matches!(model.engine, Engine::Graph(_));
    let inputs = tensor::read(request.inputs, &model.inputs, |spec, shape| {
        fits(spec, shape) || (!is_graph && nearly_fits(spec, shape))
    })?;
    let rows = inputs.first().and_then(|input| input.shape.first()).copied().unwrap_or(0);
    if rows > MOST_ROWS {
        return Err(ApiError::too_large(
            format!("the request has {rows} rows"),
            format!("send at most {MOST_ROWS} at a time"),
        ));
    }
    Ok((inputs, Asked { id: request.id, wanted }))
}

fn fits(spec: &TensorSpec, shape: &[usize]) -> bool {
    spec.shape.len() == shape.len()
        && spec.shape.iter().zip(shape).all(|(wanted, side)| wanted.is_none_or(|it| it == *side))
}

/// Of a batch of pictures a single channel may be left out, and texts may stand in a column.
fn nearly_fits(spec: &TensorSpec, shape: &[usize]) -> bool {
    match (&spec.shape[..], shape) {
        ([None, Some(1), wanted @ ..], [_, rest @ ..]) => {
            wanted.len() == rest.len()
                && wanted.iter().zip(rest).all(|(wanted, side)| *wanted == Some(*side))
        }
        ([None], [_, 1]) => true,
        _ => false,
    }
}
